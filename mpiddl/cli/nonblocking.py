"""``mpiddl bench iallreduce``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mpiddl.cli.files import json_option
from mpiddl.cli.sizes import read_counts, read_seconds, read_sizes


@click.command("iallreduce", epilog="""
\b
The ranks wait at once with MPI.Request.Waitall, or compute first, for about as long as the exchange of the MPI library takes.
The inputs are written again before each sample, outside the clock. "ms" is the median time until every rank has summed its
results. "thread" is mpiddl's algorithm, which a progress thread advances. On one node, and with MPICH, mpiddl.Communicator
uses the MPI library instead.
\b
Examples:
  mpiexec -n 2 mpiddl bench iallreduce
  mpiexec -n 4 mpiddl bench iallreduce --requests 8 --sizes 512KiB --json iallreduce.json
  mpiddl testbed run --hosts 2 --ranks-per-host 1 --rate 1gbit -- mpiddl bench iallreduce
""")
@json_option
@click.option("--requests", default="1,8", show_default=True, callback=read_counts, metavar="N,N,...",
              help="Number of operations in flight.")
@click.option("--sizes", default="64KiB,256KiB,1MiB,4MiB", show_default=True, callback=read_sizes, metavar="N,N,...",
              help="Size of each operation in bytes.")
@click.option("--seconds", default=2.0, show_default=True, callback=read_seconds, metavar="S", help="Time for each case.")
def iallreduce(path: Path | None, requests: tuple[int, ...], sizes: tuple[int, ...], seconds: float) -> None:
    """Compare Iallreduce of mpiddl.Communicator with the MPI library. Start this command with mpiexec."""
    from mpiddl.bench import nonblocking as module
    from mpiddl.study.output import check_files, keep, show

    check_files(path)
    rows = module.run(os.environ, requests, sizes, seconds)
    if rows:
        show("iallreduce", rows, ("p10", "p90"))
    keep(os.environ, "iallreduce", rows, path)
