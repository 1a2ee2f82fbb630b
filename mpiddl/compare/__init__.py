"""Compares strategies on one job with an equal budget: ``mpiddl compare JOB.toml``.

    grid        the file: strategies, numbers of workers, seeds, learning rates to try, job, budget
    preflight   finds mistakes before the first run
    backends    where a cell of the grid runs: on the simulated clock, on MPI ranks, on a testbed
    run_cell    the program that runs one cell
    store       the finished cells, in a folder; none of them is run again
    study       does the missing runs: first those that choose learning rates
    statistics  means over seeds, paired differences, intervals
    choice      which strategy is advised, by fixed rules
    advice      the verdict in words, with warnings and notes
    columns     of the tables
    document    the report as blocks, which `markdown` and `html` write and `plots` illustrates
"""
