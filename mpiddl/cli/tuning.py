"""``mpiddl tune`` and two benches: which algorithm for which size, what that brings, and what it costs where communicators live
for one call only."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mpiddl.cli.files import json_option
from mpiddl.cli.sizes import read_seconds, read_sizes
from mpiddl.errors import UsageError

CALLS = ("allreduce", "reduce", "bcast", "allgather", "reduce_scatter", "barrier")

TUNED = (*CALLS, "allreduce_unfused", "reduce_unfused", "reduce_scatter_unfused", "message")
"""A table also tells of reductions without a compiled kernel (of all types and operations but sums of float32 and float64), and
of messages over RDMA verbs."""

TYPES = ("float32", "float64", "int8", "int32", "int64", "complex64")


def add_to(mpiddl: click.Group, bench: click.Group) -> None:
    """Make the commands parts of ``mpiddl`` and of ``mpiddl bench``."""
    mpiddl.add_command(tune)
    bench.add_command(communicator)
    bench.add_command(short_lived)


def _calls(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(value.replace("-", "_").rstrip(",").split(","))
    for name in names:
        known = TUNED if context.command.name == "tune" else CALLS
        if name not in known:
            raise UsageError(f"calls: got {name!r}, expected one or more of {', '.join(known)}")
    return names


@click.command(epilog="""
\b
The table is a TOML file that people can read and share. Each entry names the cluster, processor, MPI library and node map on
which it was measured, and is used only there. mpiddl.Communicator and the strategies read the file that MPIDDL_TUNE names, or
~/.config/mpiddl/tune.toml.
\b
Examples:
  srun -N 4 -n 8 mpiddl tune                            once for each node map and MPI library
  mpiexec -n 4 mpiddl tune --out team.toml --seconds 3  for a team: export MPIDDL_TUNE=$PWD/team.toml
  mpiexec -n 4 mpiddl tune --show                       print the chosen algorithms, and why
""")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="File to write the table to.  [default: ~/.config/mpiddl/tune.toml]")
@click.option("--calls", default=",".join(TUNED), callback=_calls, metavar="NAME,...",
              help="MPI calls to measure. A name with \"unfused\" stands for reductions other than sums of float32 and "
                   "float64. \"message\" finds up to which size messages over RDMA verbs are copied.  [default: all]")
@click.option("--sizes", default="1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB", show_default=True, callback=read_sizes,
              metavar="N,N,...", help="Total sizes in bytes.")
@click.option("--seconds", default=1.0, show_default=True, callback=read_seconds, metavar="S",
              help="Time for each call and size.")
@click.option("--show", "only", is_flag=True,
              help="Print the chosen algorithm for each call and size, and the reason, without a measurement.")
def tune(out: Path | None, calls: tuple[str, ...], sizes: tuple[int, ...], seconds: float, only: bool) -> None:
    """Find the fastest algorithm for each MPI call and size on this cluster. Start this command with mpiexec or srun."""
    from mpiddl.bench import communicator as module
    from mpiddl.tuning.place import table_path

    path = out or table_path(os.environ)
    if only:
        text = module.describe(os.environ, path, calls, sizes)
    elif path is None:
        raise UsageError("out: got no home folder for the default table, expected --out FILE")
    else:
        table = module.tune(os.environ, path, calls, sizes, seconds, lambda line: click.echo(line))
        text = f"table: {path}, {len(table.entries)} entries" if table is not None else ""
    if text:
        click.echo(text)


@click.command("communicator", epilog="""
\b
Each rank writes its inputs before each call, outside the clock. "ms" is the median time until every rank has summed its result.
"chosen" is the algorithm that the communicator selected. "best" is the fastest of all algorithms, including those of the MPI
library. Each of them is forced in turn. Open MPI is also measured without its component han, with its component sm, and
with each algorithm of its component tuned: "best ratio" compares with the fastest of these.
\b
Examples:
  mpiexec -n 2 mpiddl bench communicator --calls allreduce --sizes 8B,1KiB,64KiB,4MiB
  mpiddl testbed run --hosts 4 --ranks-per-host 2 --rate 200mbit -- mpiddl bench communicator --sizes 1KiB,1MiB
""")
@json_option
@click.option("--calls", default="allreduce,bcast,allgather", callback=_calls, show_default=True, metavar="NAME,...",
              help="MPI calls to measure.")
@click.option("--sizes", default="8B,1KiB,16KiB,256KiB,1MiB,16MiB", show_default=True, callback=read_sizes, metavar="N,N,...",
              help="Total sizes in bytes.")
@click.option("--seconds", default=2.0, show_default=True, callback=read_seconds, metavar="S",
              help="Time for each call and size.")
@click.option("--table", type=click.Path(path_type=Path), metavar="FILE",
              help="Table that mpiddl tune wrote.  [default: ~/.config/mpiddl/tune.toml]")
@click.option("--dtype", default="float32", type=click.Choice(TYPES), show_default=True, help="Type of the arrays.")
@click.option("--op", default="sum", type=click.Choice(("sum", "min", "max", "prod")), show_default=True,
              help="Operation of reductions.")
@click.option("--default-only", is_flag=True,
              help="Compare with the library's default only, and not with its other settings and the other algorithms.")
def communicator(path: Path | None, calls: tuple[str, ...], sizes: tuple[int, ...], seconds: float, table: Path | None,
                 dtype: str, op: str, default_only: bool) -> None:
    """Compare mpiddl.Communicator with the MPI library alone. Start this command with mpiexec."""
    from mpiddl.bench import communicator as module
    from mpiddl.study.output import check_files, keep, show

    check_files(path)
    rows = module.run(os.environ, calls, sizes, seconds, table, dtype, op, not default_only)
    if rows:
        others = () if default_only else ("best", "of_best", "best_ratio")
        show("communicator", rows, ("slower_us", "chosen", *others))
    keep(os.environ, "communicator", rows, path)


@click.command("short-lived", epilog="""
\b
Each communicator makes one Allreduce before it is freed. The figures are the times of ten such communicators.
\b
Example:
  mpiexec -n 4 mpiddl bench short-lived --sizes 12KiB,64KiB,1MiB
""")
@json_option
@click.option("--sizes", default="12KiB,64KiB,1MiB", show_default=True, callback=read_sizes, metavar="N,N,...",
              help="Sizes of the Allreduce in bytes.")
@click.option("--seconds", default=3.0, show_default=True, callback=read_seconds, metavar="S", help="Time for each case.")
def short_lived(path: Path | None, sizes: tuple[int, ...], seconds: float) -> None:
    """Compare Dup or Split, one Allreduce and Free with the MPI library alone. Start this command with mpiexec."""
    from mpiddl.bench import short_lived as module
    from mpiddl.study.output import check_files, keep, show

    check_files(path)
    rows = module.run(os.environ, sizes, seconds)
    if rows:
        show("short-lived communicators", rows, ("p10", "p90"))
    keep(os.environ, "short-lived", rows, path)
