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
each receiver: this is what a network without multicast would carry. "late" is the part of "sent once" that was sent
in place of workers that were late. "link in" is what came in on the busiest host's link, with headers. --json also has
what went out.

\b
--law and --steps measure whole steps: a wait for the computation, and an exchange. Both print seconds in units of T_calc, the
time to compute 1/n of the batch. --law: the published scheme with one sender at a time, predicted by
r T_calc + T_comm (n-r)/(r(n-1)). --steps: sums over multicast, where all send at a time, with slices and with the MDS code.

\b
Examples:
  mpiddl testbed run --hosts 8 --rate 200mbit -- mpiddl bench coded --rate 200mbit
  mpiddl testbed run --hosts 4 --rate 200mbit -- mpiddl bench coded --size 256KiB --published
  mpiddl testbed run --hosts 8 --rate 200mbit -- mpiddl bench coded --law 8 --size 14MB
  mpiddl testbed run --hosts 10 --rate 100mbit -- mpiddl bench coded --steps 12 --redundancies 2,5
  mpiddl testbed run --hosts 8 --rate 200mbit -- mpiddl bench coded --steps 6 --redundancies 2 --slow 5
"""


def _read_some(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """None given: as many as there are ranks for."""
    return read_counts(context, parameter, value) if value else ()


@click.command(epilog=EPILOG)
@json_option
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also draw the bytes of each scheme.")
@click.option("--size", default="1MiB", show_default=True, metavar="SIZE",
              help="Size of a gradient, or with --law of all block gradients together.")
@click.option("--redundancies", default="", callback=_read_some, metavar="R,R,...",
              help="Numbers of workers that have the same gradient.  [default: 1 to 4, at most the number of ranks]")
@click.option("--repeats", default=10, show_default=True, type=click.IntRange(min=1), metavar="N", help="Calls of each scheme.")
@click.option("--rate", metavar="RATE", help="Rate of each link, such as 200mbit. Adds the shortest possible time.")
@click.option("--published", is_flag=True, help="Also measure the published code. It sends many more bytes.")
@click.option("--law", type=click.FloatRange(min=0.01), metavar="X", help="Measure the published law with T_comm / T_calc = X.")
@click.option("--steps", type=click.FloatRange(min=0.01), metavar="X",
              help="Measure training steps (a wait and a sum) with T_comm / T_calc = X.")
@click.option("--slow", default=1.0, type=click.FloatRange(min=1), metavar="F",
              help="With --steps: rank 1 computes F times as long, 2 or more. The figures leave it out.")
def coded(path: Path | None, plot: Path | None, size: str, redundancies: tuple[int, ...], repeats: int, rate: str | None,
          published: bool, law: float | None, steps: float | None, slow: float) -> None:
    """Measure the bytes and the seconds of each scheme for redundant gradients.

    Start this command with mpiexec.
    """
    from mpiddl.bench import coded as module
    from mpiddl.bench import coded_steps
    from mpiddl.errors import UsageError
    from mpiddl.study.output import check_files, keep, show

    check_files(path, plot)
    nbytes = parse_size(size, "size")
    if law is not None and steps is not None:
        raise UsageError("--law, --steps: got both, expected one of them")
    if law is not None or steps is not None:
        for name, given in (("--rate", rate), ("--published", published), ("--plot", plot)):
            if given:
                raise UsageError(f"{name}: got it with {'--law' if steps is None else '--steps'}, expected it without")
    if 1 < slow < 2:
        raise UsageError(f"--slow: got {slow:g}, expected 1, or 2 or more")
    if slow > 1 and steps is None:
        raise UsageError(f"--slow: got {slow:g} without --steps, expected it with --steps")
    if law is not None:
        rows = coded_steps.law(os.environ, nbytes, law, redundancies, repeats)
        columns = ["in_t_calc", "predicted"]
    elif steps is not None:
        rows = coded_steps.sums(os.environ, nbytes, steps, redundancies, repeats, slow)
        columns = ["in_t_calc", "predicted", "saved"]
    else:
        rows = module.run(os.environ, nbytes, redundancies, repeats, rate, published)
        columns = ["sent_once_bytes", "formula_bytes", "late_bytes", "replicated_bytes", "link_in_bytes", "limit_seconds"]
    if rows:
        show("coded", rows, columns)
    keep(os.environ, "coded", rows, path, plot, module.draw if law is None and steps is None else None)
