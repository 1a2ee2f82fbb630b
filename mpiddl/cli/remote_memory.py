"""``mpiddl bench remote-memory``."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import click

from mpiddl.cli.files import json_option
from mpiddl.cli.sizes import read_seconds, read_sizes

EPILOG = """
\b
"wanted" is the ratio that mpiddl aims at: 0.75 of what a memory copy would reach against gRPC. gRPC has the fastest of its
settings: TCP or a Unix socket, in chunks or in one message. Over verbs, the command also measures an RPC that copies the array
into registered buffers, and out of them.

\b
Examples:
  mpiexec -n 2 mpiddl bench remote-memory
  mpiexec -n 2 mpiddl bench remote-memory --kind verbs --sizes 1MiB,64MiB
"""


@click.command("remote-memory", epilog=EPILOG)
@json_option
@click.option("--sizes", default="1MiB,7454760B,64MiB", show_default=True, callback=read_sizes, metavar="N,N,...",
              help="Sizes of the array.")
@click.option("--kind", default="auto", show_default=True, type=click.Choice(("auto", "shared", "verbs", "mpi")),
              help="What carries it: shared memory, RDMA verbs, MPI windows, or the first of these that works.")
@click.option("--seconds", default=10.0, show_default=True, callback=read_seconds, metavar="S", help="Time for each size and "
                                                                                                     "direction.")
def remote_memory(path: Path | None, sizes: tuple[int, ...], kind: str, seconds: float) -> None:
    """Compare remote memory with a memory copy and with gRPC (pip install mpiddl[grpc]). Start this command with mpiexec."""
    from mpiddl.bench import remote_memory as module
    from mpiddl.study.output import check_files, keep, show

    check_files(path)
    rows = module.run(os.environ, sizes, seconds, kind)
    if rows:
        show("remote memory", rows, ("p10", "p90", "of_memcpy", "wanted"))
        if find_spec("grpc") is None:
            click.echo("gRPC: not installed, so not compared. Install it with: pip install 'mpiddl[grpc]'")
    keep(os.environ, "remote memory", rows, path)
