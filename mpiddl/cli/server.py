"""``mpiddl bench server``."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import click

EPILOG = """
\b
"wanted" is the least ratio: a pull in 1.5 times what a copy takes; a push and a pull 6 times as fast as over gRPC; between
nodes a pull within 15 % of the wire's time, and 95 % of the pulls from a rank that computes under twice an idle one.

\b
Examples:
  mpiexec -n 2 mpiddl bench server
  mpiddl testbed run --hosts 2 --ranks-per-host 1 --rate 1gbit -- mpiddl bench server --rate 1gbit
"""


@click.command(epilog=EPILOG)
@click.option("--json", "path", type=click.Path(path_type=Path), metavar="FILE", help="Also write environment and rows.")
@click.option("--rate", metavar="RATE", help="What each link carries, e.g. 1gbit, instead of timing a message.")
@click.option("--seconds", default=15.0, show_default=True, type=click.FloatRange(0, 86_400), metavar="S", help="Time.")
def server(path: Path | None, rate: str | None, seconds: float) -> None:
    """The one-sided parameter server: pulls against memory and wire, a push and a pull against gRPC (mpiddl[grpc])."""
    from mpiddl.bench import server as module
    from mpiddl.bench.output import check_files, keep, show

    check_files(path)
    rows = module.run(os.environ, seconds, rate)
    if rows:
        show("parameter server", rows, ("p10", "p90", "wanted"))
        if find_spec("grpc") is None:
            click.echo("gRPC: not installed, so not compared; pip install 'mpiddl[grpc]'")
    keep(os.environ, "parameter server", rows, path)
