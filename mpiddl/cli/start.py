"""``mpiddl bench start``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mpiddl.cli.files import json_option
from mpiddl.cli.sizes import read_counts
from mpiddl.errors import UsageError
from mpiddl.machine.launch import promise

EPILOG = """
\b
The programs are: mpi4py and numpy alone, a Communicator that is not used, its first short and its first long Allreduce,
`mpiddl pca` on 50 x 450 numbers, and `mpiddl train --data digits --max-steps 1`. "cpu seconds" and "resident MiB" are those of
the rank that has most.

\b
Examples:
  mpiddl bench start
  mpiddl bench start --ranks 1 --rounds 9 --json start.json
"""


@click.command(epilog=EPILOG)
@json_option
@click.option("--ranks", default="1,2", show_default=True, callback=read_counts, metavar="N,N,...",
              help="Numbers of ranks to start. The command starts mpiexec itself.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="Starts of each program. Each figure is their median.")
def start(path: Path | None, ranks: tuple[int, ...], rounds: int) -> None:
    """Time and memory that short programs take from their start to their end."""
    from mpiddl.bench import start as module
    from mpiddl.study.output import check_files, show, write

    if promise(os.environ).size > 1:
        raise UsageError("start: got several ranks, expected one; start it without mpiexec, and name --ranks")
    check_files(path)
    rows = module.run(os.environ, ranks, rounds, lambda text: click.echo(text, err=True))
    show("start", rows, ("cpu_seconds", "resident_MiB"))
    if path:
        write(path, rows)
