"""``mpiddl bench allreduce|bcast|allgather|reduce-scatter``: the same options for all four."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mpiddl.cli.files import json_option
from mpiddl.cli.sizes import read_seconds, read_sizes

KINDS = {
    "allreduce": "Compare mpiddl's all-reduce with that of the MPI library. Each rank receives the sum of the arrays of "
                 "all ranks. Algorithms: two-step, leader, ring and recursive doubling.",
    "bcast": "Compare mpiddl's broadcast with that of the MPI library. Each rank receives the array of one rank. "
             "Algorithms: pipelined chain, binomial tree, scatter with all-gather, and, between hosts, multicast.",
    "allgather": "Compare mpiddl's all-gather with that of the MPI library. Each rank receives the blocks of all ranks. "
                 "Algorithms: ring, and, between hosts, multicast.",
    "reduce-scatter": "Compare mpiddl's reduce-scatter with that of the MPI library. Each rank receives one block of the sum. "
                      "Algorithm: ring.",
}

EPILOG = """
\b
The inputs are written again before each call, outside the clock. "ms" is the median time until every rank has summed its
result, "call ms" the time of the call alone. "ratio" is "ms" of the MPI library divided by "ms" of the row. Open MPI is also
measured without its component han, with its component sm, and with each algorithm of its component tuned: "best
ratio" compares with the fastest of these. The table shows the fastest one, the file of --json all of them. "of limit"
compares "call ms" with the limit, measured in the same run: on one node the memory bandwidth (all ranks compute c = a + b,
or copy b = a), between nodes the links (each node sends and receives the bytes that must cross). 1 is the limit. "in place"
needs arrays in shared memory. The other algorithms take any array. "link" counts the bytes that left the busiest host.

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
    @click.command(name, help=f"{text} Start this command with mpiexec.", epilog=EPILOG.format(name=name))
    @json_option
    @click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also draw time against size.")
    @click.option("--sizes", default="16KiB,256KiB,1MiB,16MiB,64MiB", show_default=True, callback=read_sizes, metavar="N,N,...",
                  help="Sizes of the array in bytes.")
    @click.option("--dtype", default="float32", show_default=True, metavar="NAME", help="Data type of the elements.")
    @click.option("--seconds", default=4.0, show_default=True, callback=read_seconds, metavar="S",
                  help="Time for each size.")
    @click.option("--rate", metavar="RATE", help="Rate of each link, such as 200mbit.  [default: the measured rate]")
    @click.option("--algorithms", metavar="NAME,...", help="Measure only these, beside the MPI library as it comes.  [default: "
                  "all, and settings of the library]")
    def command(path: Path | None, plot: Path | None, sizes: tuple[int, ...], dtype: str, seconds: float,
                rate: str | None, algorithms: str | None) -> None:
        from mpiddl.bench import collectives as module
        from mpiddl.study.output import check_files, keep, show

        check_files(path, plot)
        rows = module.run(name, os.environ, sizes, dtype, seconds, rate, tuple(filter(None, (algorithms or "").split(","))))
        if rows:
            some = [row for row in rows if row["contender"] in ("library", row["best_library"])
                    or not row["contender"].startswith("library")]
            show(name, some, ("call_seconds", "best_ratio", "of_limit", "sent_bytes", "link_bytes"))
        keep(os.environ, name, rows, path, plot)

    return command
