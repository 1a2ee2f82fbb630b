"""The progress bar of all commands: on standard error, with rich."""

from __future__ import annotations


class ProgressBar:
    """It is shown from the first `update` on, until `close`.

    Parameters
    ----------
    width : int
        Of the terminal, in characters.
    total : float
        What ``done`` will be at the end.
    unit : str
        What is counted, such as "steps": then the bar has the counts and an estimate of the time that is left. Otherwise it has
        the time so far.
    """

    def __init__(self, width: int, total: float, unit: str = ""):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        counts = (MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn()) if unit else (TimeElapsedColumn(),)
        columns = (BarColumn(), *counts, TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=Console(stderr=True, force_terminal=True, width=width))
        self._task = self._bar.add_task("", total=total)

    def update(self, done: float, text: str) -> None:
        """``text`` stands behind the bar."""
        self._bar.start()
        self._bar.update(self._task, completed=done, description=text)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._bar.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar.live.is_started:
            self._bar.stop()
