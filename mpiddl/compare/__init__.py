"""Strategies beside each other on one job, at an equal budget: ``mpiddl compare JOB.toml``.

    grid        the file: which strategies, worker counts and seeds, on which job, with what budget
    places      where a cell of the grid runs: simulated, on this machine's ranks, on a testbed
    cell        the program that a cell is
    store       finished cells, in a folder; nothing that is in it is run again
    study       runs what is missing
    figures     what the cells say: means over seeds, differences of the same seed, intervals
    advice      the same in plain language, with a recommendation
    document    the report as blocks, which `markdown` and `page` write; `plots` draws
"""
