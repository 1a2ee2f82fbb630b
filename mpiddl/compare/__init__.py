"""Compares strategies on one job with an equal budget: ``mpiddl compare JOB.toml``.

    grid        the file: strategies, numbers of workers, seeds, job, budget
    places      where a cell of the grid runs: on the simulated clock, on MPI ranks, on a testbed
    cell        the program that runs one cell
    store       the finished cells, in a folder; none of them is run again
    study       does the missing runs
    figures     means over seeds, paired differences, intervals
    choice      which strategy is advised, by fixed rules
    advice      the verdict in words, with warnings and notes
    columns     of the tables
    document    the report as blocks, which `markdown` and `page` write and `plots` illustrates
"""
