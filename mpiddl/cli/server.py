"""``mpiddl bench server``."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import click

from mpiddl.cli.files import json_option

EPILOG = """
\b
"wanted" is the ratio that mpiddl aims at. On one node a pull takes at most 1.5 times as long as a memory copy, and a push with
a pull is at least 6 times as fast as over gRPC. Between nodes a pull takes at most 15 % longer than the wire needs, and 95 % of
the pulls from a rank that computes take less than twice as long as from an idle one.

\b
Examples:
  mpiexec -n 2 mpiddl bench server
  mpiddl testbed run --hosts 2 --ranks-per-host 1 --rate 1gbit -- mpiddl bench server --rate 1gbit
"""


@click.command(epilog=EPILOG)
@json_option
@click.option("--rate", metavar="RATE", help="Rate of each link, such as 1gbit.  [default: the measured rate]")
@click.option("--seconds", default=15.0, show_default=True, type=click.FloatRange(0, 86_400), metavar="S",
              help="Time for the measurement.")
def server(path: Path | None, rate: str | None, seconds: float) -> None:
    """Compare the one-sided parameter server with memory copies, the network and gRPC (pip install mpiddl[grpc])."""
    from mpiddl.bench import server as module
    from mpiddl.study.output import check_files, keep, show

    check_files(path)
    rows = module.run(os.environ, seconds, rate)
    if rows:
        show("parameter server", rows, ("p10", "p90", "wanted"))
        if find_spec("grpc") is None:
            click.echo("gRPC: not installed, so not compared. Install it with: pip install 'mpiddl[grpc]'")
    keep(os.environ, "parameter server", rows, path)
