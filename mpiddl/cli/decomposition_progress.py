"""How far the estimated error of a decomposition has fallen: a bar on a terminal, elsewhere a line after each pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import log
from typing import TYPE_CHECKING

from mpiddl.machine import terminal
from mpiddl.machine.progress_bar import ProgressBar

if TYPE_CHECKING:
    from mpiddl.decomposition import Moment


@contextmanager
def progress(tol: float) -> Iterator[Callable[[int, Moment], None]]:
    """Yields what is to be called after each pass, with the rank and the `Moment`; rank 0 shows it on standard error."""
    width = terminal.columns()
    bar = ProgressBar(width, 1.0) if width else None

    def show(rank: int, moment: Moment) -> None:
        share = done(moment.error, tol)
        if rank == 0 and bar:
            bar.update(share, f"{moment.passes:.1f} passes, error {moment.error:.1e}, target {tol:g}")
        elif rank == 0:
            marks = "#" * int(30 * share)
            print(f"pass {moment.passes:5.1f}  {moment.seconds:8.2f} s  error {moment.error:8.1e}  [{marks:<30}] {tol:g}",
                  file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if bar:
            bar.close()


def done(error: float, tol: float) -> float:
    """How much of its way from 1 to ``tol`` the logarithm of an error has come.

    Examples
    --------
    >>> round(done(1e-4, 1e-8), 6), done(1e-9, 1e-8), done(3.0, 1e-8)
    (0.5, 1.0, 0.0)
    """
    if error <= tol:
        return 1.0
    return max(0.0, min(0.99, log(min(error, 1.0)) / log(tol))) if 0 < tol < 1 else 0.0
