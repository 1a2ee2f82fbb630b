"""``mpiddl bench allreduce|bcast|allgather|reduce-scatter``: the same options for all four."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mpiddl.cli.sizes import read_seconds, read_sizes

KINDS = {
    "allreduce": "Sum the ranks' arrays: two-step, leader, ring and recursive doubling",
    "bcast": "Give one rank's array to all: pipelined chain, scatter and all-gather, binomial tree",
    "allgather": "Put the ranks' blocks together on all: ring",
    "reduce-scatter": "Sum the ranks' arrays, a block for each: ring",
}

EPILOG = """
\b
"ratio" is the library's median over ours; "of limit" is how near we are to what memory (one node: c = a + b by all ranks, or
b = a) or the links (every node sends and receives the bytes that must cross) did in the same run: 1 is all there is.
"in place" works on arrays in shared memory; the others on any array. "link" counts the bytes that left the busiest host.

\b
Examples:
  mpiexec -n 2 mpiddl bench {name}
  mpiexec -n 4 mpiddl bench {name} --sizes 64KiB,1MiB --seconds 2 --json {name}.json --plot {name}.png
  mpiddl testbed run --hosts 4 --ranks-per-host 2 --rate 200mbit -- mpiddl bench {name} --sizes 16MiB --rate 200mbit
"""


def add_to(bench: click.Group) -> None:
    """Make the four commands parts of ``mpiddl bench``."""
    for name, text in KINDS.items():
        bench.add_command(_command(name, text))


def _command(name: str, text: str) -> click.Command:
    @click.command(name, help=f"{text}, against the MPI library. Start it under mpiexec.", epilog=EPILOG.format(name=name))
    @click.option("--json", "path", type=click.Path(path_type=Path), metavar="FILE", help="Also write environment and rows.")
    @click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also draw seconds over sizes.")
    @click.option("--sizes", default="16KiB,256KiB,1MiB,16MiB,64MiB", show_default=True, callback=read_sizes, metavar="N,N,...",
                  help="Sizes of the array.")
    @click.option("--dtype", default="float32", show_default=True, metavar="NAME", help="Its elements.")
    @click.option("--seconds", default=4.0, show_default=True, callback=read_seconds, metavar="S",
                  help="Time for each size.")
    @click.option("--rate", metavar="RATE", help="What each link carries, e.g. 200mbit, instead of measuring it.")
    def command(path: Path | None, plot: Path | None, sizes: tuple[int, ...], dtype: str, seconds: float,
                rate: str | None) -> None:
        from mpiddl.bench import collectives as module
        from mpiddl.bench.output import check_files, keep, show

        check_files(path, plot)
        rows = module.run(name, os.environ, sizes, dtype, seconds, rate)
        if rows:
            show(name, rows, ("p10", "p90", "of_limit", "sent_bytes", "link_bytes"))
        keep(os.environ, name, rows, path, plot)

    return command
