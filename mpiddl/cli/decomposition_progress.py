"""How far the estimated error of a decomposition has fallen: a bar on a terminal, elsewhere a line after each pass."""

from __future__ import annotations

import sys
from math import log
from typing import TYPE_CHECKING, Any

from mpiddl.machine import terminal

if TYPE_CHECKING:
    from mpiddl.decomposition import Moment


def progress(tol: float) -> Lines | Bar:
    """The progress display for standard error, as a context manager; call it after each pass."""
    width = terminal.columns()
    return Bar(tol, width) if width else Lines(tol)


class Lines:
    """A line after each pass."""

    def __init__(self, tol: float):
        self.tol = tol

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *problem: object) -> None: ...

    def __call__(self, rank: int, moment: Moment) -> None:
        if rank == 0:
            bar = "#" * int(30 * done(moment.error, self.tol))
            print(f"pass {moment.passes:5.1f}  {moment.seconds:8.2f} s  error {moment.error:8.1e}  [{bar:<30}] {self.tol:g}",
                  file=sys.stderr, flush=True)


class Bar:
    """One bar, full when the error has come down to the tolerance, and how long it has taken."""

    def __init__(self, tol: float, width: int):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        self.tol = tol
        self._bar = Progress(*columns, console=Console(stderr=True, force_terminal=True, width=width))
        self._task: Any = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *problem: object) -> None:
        if self._task is not None:
            self._bar.stop()

    def __call__(self, rank: int, moment: Moment) -> None:
        if rank:
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=1.0)
        text = f"{moment.passes:.1f} passes, error {moment.error:.1e}, target {self.tol:g}"
        self._bar.update(self._task, completed=done(moment.error, self.tol), description=text)


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
