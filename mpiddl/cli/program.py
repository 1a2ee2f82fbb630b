"""`mpiddl run`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from mpiddl.machine import launch


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, epilog="""
\b
Examples:
  mpiexec -n 4 mpiddl run train.py --epochs 3                        your program, its batches divided over 4 ranks
  mpiexec -n 4 mpiddl run --strategy local-sgd:period=8 train.py     average the models every 8 steps
""")
@click.option("--strategy", default="auto", show_default=True, metavar="NAME[:key=value,...]",
              help="How ranks exchange gradients or parameters. `mpiddl train --help` lists the names.")
@click.option("--steps", default=0, metavar="N", type=click.IntRange(min=0),
              help="Optimiser steps of the whole run, for strategies that plan ahead. 0: not known.")
@click.option("--quiet", is_flag=True, help="Print no table at the end.")
@click.option("--summary", type=click.Path(path_type=Path), metavar="FILE.json",
              help="Write the table, the seconds and the bytes sent to this file.")
@click.argument("program", metavar="PROGRAM.py")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(strategy: str, steps: int, quiet: bool, summary: Path | None, program: str, args: tuple[str, ...]) -> None:
    """Run a program for one machine on all ranks, without changes to it.

    The ranks divide the training batches of PyTorch's DataLoader, the forward passes of PyTorch programs that have none, fit
    and evaluate of Keras models, and fit of scikit-learn's PCA, TruncatedSVD and MLPs. They combine their gradients. Printing
    and files come from rank 0. A table at the end says what was divided.
    """
    from mpiddl.programs.run import run as run_program
    from mpiddl.programs.run import same_hashes

    again = same_hashes(dict(os.environ), launch.promise(os.environ).size)
    if again is not None:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], again)
    run_program(program, args, strategy, steps, quiet, summary)
