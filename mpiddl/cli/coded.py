"""``mpiddl bench coded``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mpiddl.cli.files import json_option
from mpiddl.cli.sizes import parse_size, read_counts

EPILOG = """
\b
Each rank is a worker: start one rank on each host. With redundancy r, groups of r workers have the same gradient, and
each sends a slice of it: by multicast, or in rings. "sent once" counts a multicast message once, "replicated" once for
each receiver: as many bytes are sent where the network makes no copies. "link in" is what came in on the busiest
host's link, with headers. --json also has what went out. --law measures the published scheme with one sender at a time against
r T_calc + T_comm (n-r)/(r(n-1)), in units of T_calc.

\b
Examples:
  mpiddl testbed run --hosts 8 --rate 200mbit -- mpiddl bench coded --rate 200mbit
  mpiddl testbed run --hosts 4 --rate 200mbit -- mpiddl bench coded --size 256KiB --published
  mpiddl testbed run --hosts 8 --rate 200mbit -- mpiddl bench coded --law 8 --size 14MB
"""


@click.command(epilog=EPILOG)
@json_option
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also draw the bytes of each scheme.")
@click.option("--size", default="1MiB", show_default=True, metavar="SIZE",
              help="Size of a gradient, or with --law of all block gradients together.")
@click.option("--redundancies", default="1,2,3,4", show_default=True, callback=read_counts, metavar="R,R,...",
              help="Numbers of workers that have the same gradient.")
@click.option("--repeats", default=10, show_default=True, type=click.IntRange(min=1), metavar="N", help="Calls of each scheme.")
@click.option("--rate", metavar="RATE", help="Rate of each link, such as 200mbit, for the limit.")
@click.option("--published", is_flag=True, help="Also measure the published code, which sends much more.")
@click.option("--law", type=click.FloatRange(min=0.01), metavar="X", help="Measure the published law with T_comm / T_calc = X.")
def coded(path: Path | None, plot: Path | None, size: str, redundancies: tuple[int, ...], repeats: int, rate: str | None,
          published: bool, law: float | None) -> None:
    """Measure gradients that several workers compute: the bytes that each scheme sends, and its seconds.

    Start this command with mpiexec.
    """
    from mpiddl.bench import coded as module
    from mpiddl.study.output import check_files, keep, show

    check_files(path, plot)
    nbytes = parse_size(size, "size")
    if law is not None:
        rows = module.law(os.environ, nbytes, law, redundancies, repeats)
        columns = ["in_t_calc", "predicted"]
    else:
        rows = module.run(os.environ, nbytes, redundancies, repeats, rate, published)
        columns = ["sent_once_bytes", "formula_bytes", "replicated_bytes", "link_in_bytes", "limit_seconds"]
    if rows:
        show("coded", rows, columns)
    keep(os.environ, "coded", rows, path, plot, module.draw if law is None else None)
