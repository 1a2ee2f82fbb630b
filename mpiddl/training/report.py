"""What a person sees of a run: one progress bar or plain lines while it goes, one table at its end, plots in its folder.

Everything here runs on rank 0 alone and prints; nothing computes. Lines go to standard error, the table to standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from mpiddl.machine import terminal
from mpiddl.machine.clock import now
from mpiddl.machine.progress_bar import ProgressBar
from mpiddl.training.metrics import Split

QUIET_S = 10.0  # without a terminal: the longest silence between two lines


class Progress(Protocol):
    """Shows lines of metrics as they come."""

    def show(self, line: Mapping[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


def progress(rank: int, steps: int, first: int, quiet: bool) -> Progress:
    """The progress display of a rank: none off rank 0, a bar on a terminal, plain lines elsewhere."""
    if rank or quiet:
        return Silence()
    width = terminal.columns()
    return Bar(steps, first, width) if width else PlainLines(steps)


class Silence:
    """Shows nothing."""

    def show(self, line: Mapping[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainLines:
    """A line at each validation, and one whenever it has been quiet for long."""

    def __init__(self, steps: int):
        self.steps, self._last, self._spoke = steps, "", now()

    def show(self, line: Mapping[str, Any]) -> None:
        if "validation_loss" in line:
            self.say(f"{self._last}  {_validation(line)}")
            return
        self._last = f"step {line['step']}/{self.steps}  epoch {line['epoch']:g}  {_figures(line)}"
        if now() - self._spoke > QUIET_S:
            self.say(self._last)

    def say(self, text: str) -> None:
        print(text.strip(), file=sys.stderr, flush=True)
        self._spoke = now()

    def close(self) -> None: ...


class Bar:
    """One bar for the whole run, with the newest figures behind it."""

    def __init__(self, steps: int, first: int, width: int):
        self._bar, self._validation = ProgressBar(width, steps, "steps"), ""
        self.say, self.close = self._bar.say, self._bar.close
        self._bar.update(first, "")

    def show(self, line: Mapping[str, Any]) -> None:
        if "validation_loss" in line:
            self._validation = _validation(line)
            return
        self._bar.update(line["step"], f"{_figures(line)}  {self._validation}")


def _figures(line: Mapping[str, Any]) -> str:
    accuracy = "" if line["accuracy"] is None else f"  accuracy {line['accuracy']:.4f}"
    return f"loss {_number(line['loss'])}{accuracy}"


def _validation(line: Mapping[str, Any]) -> str:
    if line["validation_accuracy"] is None:
        return f"validation loss {_number(line['validation_loss'])}"
    return f"validation {line['validation_accuracy']:.4f}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def show_summary(summary: Mapping[str, Any], splits: Sequence[Split]) -> None:
    """Print the result, and a table of the seconds and bytes of the ranks."""
    from rich import box
    from rich.table import Table

    slowest = max(range(len(splits)), key=lambda rank: splits[rank].compute)
    ranks = f"{len(splits)} rank{'s' * (len(splits) > 1)}"
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("per rank")
    for name in ("mean", "share of time", f"slowest, rank {slowest}"):
        table.add_column(name, justify="right")
    whole = sum(sum(split[:3]) for split in splits) or 1.0
    for phase in ("compute", "communication", "waiting"):
        seconds = [getattr(split, phase) for split in splits]
        table.add_row(f"{phase} (s)", f"{sum(seconds) / len(seconds):.3f}", f"{sum(seconds) / whole:.0%}",
                      f"{seconds[slowest]:.3f}")
    table.add_row("sent (MB)", f"{sum(split.bytes for split in splits) / len(splits) / 1e6:.2f}", "",
                  f"{splits[slowest].bytes / 1e6:.2f}")
    print(f"\n{headline(summary)}\n{summary['strategy_name']} on {ranks}, {summary['mpi']}")
    if summary.get("reproducible"):
        print(f"reproducible: the SHA-256 of the weights is {summary['checkpoint_sha256']}")
    if overlap := summary.get("overlap"):
        print("A step on rank 0 has {communication_ms:.1f} ms of communication. {could_be_hidden_ms:.1f} ms of it can be "
              "hidden behind computation, and {was_hidden_ms:.1f} ms were hidden.".format(**overlap))
    if coding := summary.get("coding"):
        print(*_coding(coding), sep="\n")
    if clipped := summary.get("clipped_fraction"):
        print(f"{100 * clipped:.2g} % of the elements of gradients were clipped; a larger `clip` of the strategy avoids this.")
    _console().print(table)
    for sentence in summary.get("too_many_ranks", ()):
        print(sentence)


def _coding(coding: Mapping[str, Any]) -> list[str]:
    """What redundancy was good for, in sentences."""
    said = []
    if coding["predicted_s"] and coding["step_s"]:
        said.append(f"A step took {1e3 * coding['step_s']:.3g} ms (median); {1e3 * coding['predicted_s']:.3g} ms were "
                    "predicted.")
    for worker, count in coding["not_waited_for"].items():
        left_out = coding["left_out"].get(worker, 0)
        said.append(f"Worker {worker} was late in {count} {'step' if count == 1 else 'steps'}. The others did not wait for it. "
                    f"It left out {left_out} {'gradient' if left_out == 1 else 'gradients'}.")
    return said


def headline(summary: Mapping[str, Any]) -> str:
    """The result in one line."""
    accuracy, loss = summary["test_accuracy"], summary["test_loss"]
    parts = [f"test accuracy {accuracy:.2%}"] if accuracy is not None else []
    parts += [f"test loss {_number(loss)} over {summary['test_rows']} rows"] if summary["test_rows"] else ["no test rows"]
    parts += [f"{summary['steps']} steps", f"{summary['seconds']:.1f} s"]
    return ", ".join(parts) + (f"; ended early: {summary['ended']}" if summary["ended"] else "")


def plot_curves(path: Path, lines: Sequence[Mapping[str, Any]]) -> bool:
    """Draw loss and accuracy against steps, seconds and bytes; False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 3, sharey="row")
    across = (("step", "steps", 1.0), ("elapsed", "seconds", 1.0), ("bytes", "megabytes sent, all ranks", 1e-6))
    for row, measure in enumerate(("loss", "accuracy")):
        for column, (key, label, unit) in enumerate(across):
            validations = [line for line in lines if line.get(f"validation_{measure}") is not None]
            for name, shown, style in ((measure, even_windows(lines, measure), "-"),
                                       (f"validation_{measure}", validations, "o-")):
                points = [(line[key] * unit, line[name]) for line in shown]
                if points:
                    axes[row, column].plot(*zip(*points, strict=True), style, ms=4, label=name.replace("_", " "))
            axes[row, column].set_xlabel(label)
            axes[row, column].grid(alpha=0.3)
        axes[row, 0].set_ylabel(measure)
        if axes[row, 0].lines:
            axes[row, 0].legend()
    figure.savefig(path, dpi=110)
    return True


def even_windows(lines: Sequence[Mapping[str, Any]], measure: str) -> list[dict[str, Any]]:
    """Lines of training with a mean of ``measure`` over about equally many steps each.

    A line covers the steps since the line before it, few where an epoch ends: the mean over 7 steps between means over 50 would
    draw a saw. So lines are joined, weighted by their steps, until they cover as many as the longest line.

    Examples
    --------
    >>> lines = [{"step": 50, "loss": 2.0}, {"step": 57, "loss": 9.0}, {"step": 107, "loss": 2.0}]
    >>> [(line["step"], round(line["loss"], 2)) for line in even_windows(lines, "loss")]
    [(50, 2.0), (107, 2.86)]
    """
    kept = [line for line in lines if line.get(measure) is not None]
    steps = [max(after - before, 1) for before, after in pairwise([0, *(line["step"] for line in kept)])]
    most = max(steps[1:] or steps, default=0)  # the first line of a run that was resumed may seem to cover all before it
    joined: list[dict[str, Any]] = []
    covered: list[int] = []
    for line, count in zip(kept, steps, strict=True):
        if joined and covered[-1] < most:
            _join(joined, covered, line, count, measure)
        else:
            joined.append(dict(line))
            covered.append(min(count, most))
    if len(joined) > 1 and covered[-1] < most:  # the end of the run
        _join(joined, covered, joined.pop(), covered.pop(), measure)
    return joined


def _join(joined: list[dict[str, Any]], covered: list[int], line: Mapping[str, Any], count: int, measure: str) -> None:
    """Put one more line into the last of ``joined``."""
    total = covered[-1] + count
    mean = (joined[-1][measure] * covered[-1] + line[measure] * count) / total
    joined[-1], covered[-1] = {**line, measure: mean}, total


def _console() -> Any:
    """A console without colours: under mpiexec standard output may be a terminal whose other end is a file."""
    from rich.console import Console

    return Console(color_system=None, width=100)
