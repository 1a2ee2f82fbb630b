"""Repeated runs: journal, processes, interleaving, intervals, output. Shared by `mpiddl.bench` and `mpiddl.compare`."""
