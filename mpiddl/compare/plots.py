"""The pictures of a report, as PNG files in memory; they need matplotlib."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from mpiddl.compare.grid import Cell, Grid
from mpiddl.compare.numbers import percent
from mpiddl.compare.statistics import Entry, entries, points, sent

AXES = (
    ("seconds", "seconds of training", 1.0),
    ("bytes", "MB sent by all ranks", 1e-6),
    ("samples", "thousand rows trained on", 1e-3),
)
DRAWN = 15.0
"""Points below the best that are drawn: the first validations would take up the whole scale."""


LOGARITHMIC = " The scale of MB is logarithmic."
PHASES = ("compute", "computing"), ("communication", "communicating"), ("waiting", "waiting")
MARKERS = "osD^vPX*<>"


class Picture(NamedTuple):
    """``name`` of its file; ``caption``, what it shows and how to read it."""

    name: str
    caption: str
    png: bytes


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        return False
    return True


def pictures(grid: Grid, found: Mapping[Cell, Mapping[str, Any]], workers: int) -> Iterator[Picture]:
    """The pictures for one number of workers, that of the verdict first."""
    there = [entry for entry in entries(grid, found, workers) if entry.good]
    curved = [entry for entry in there if any(outcome["curve"] for outcome in entry.good.values())]
    if curved:
        caption = ("Accuracy on the validation rows during training: by seconds, by bytes and by rows trained on. Higher and "
                   "further left is better. Points: means over the seeds; bands: lowest to highest seed."
                   + LOGARITHMIC * _spread(curved))
        yield Picture(f"accuracy-{workers}.png", caption, _curves(grid, curved))
    if there:
        caption = ("Test accuracy of the finished models: by bytes sent. Higher and further left is better. Points: means over "
                   "the seeds; bars: lowest to highest seed." + LOGARITHMIC * _spread(there))
        yield Picture(f"ends-{workers}.png", caption, _ends(grid, there))
    if timed := [entry for entry in there if any(entry.mean(partial(_phase, name)) for name in PHASES)]:
        caption = ("Training time by activity, mean over ranks and seeds: computing; communicating (sending, receiving, adding "
                   "up, and waiting for an answer where that cannot be separated); waiting for other ranks. Shorter is faster.")
        yield Picture(f"time-{workers}.png", caption, _time(grid, timed))
    late = [entry for entry in there if entry.staleness()]
    if late:
        caption = ("Staleness: share of gradients by the number of updates that other workers made before the gradient was "
                   "applied. Further right means computed from older parameters.")
        yield Picture(f"staleness-{workers}.png", caption, _staleness(grid, late))


def _curves(grid: Grid, there: Sequence[Entry]) -> bytes:
    figure = _figure(12.0, 4.6)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, (axis, label, unit) in zip(panels, AXES, strict=True):
        for entry in there:
            x, y, low, high = _mean_curve(entry, axis, unit)
            colour = _colour(grid, entry)
            axes.plot(x, y, f"{_marker(grid, entry)}-", ms=4, lw=1.2, color=colour, label=_label(grid, entry))
            axes.fill_between(x, low, high, color=colour, alpha=0.12, lw=0)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        if grid.target:
            axes.axhline(100 * grid.target, color="k", ls="--", lw=1, label=f"target, {percent(grid.target)}")
        if axis == "bytes" and _spread(there):
            _logarithmic(axes)
    panels[0].set_ylabel("validation accuracy, %")
    outcomes = [outcome for entry in there for outcome in entry.good.values()]
    heights = [100 * (point["accuracy"] or 0.0) for outcome in outcomes for point in outcome["curve"]]
    panels[0].set_ylim(bottom=max(min(heights) - 1, max(heights) - DRAWN), top=min(100.0, max(heights) + 1))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    return _png(figure)


def _mean_curve(entry: Entry, axis: str, unit: float) -> tuple[list[float], ...]:
    """For the validations that all seeds have: the mean place on the axis, and the mean, lowest and highest accuracy."""
    curves = [outcome["curve"] for outcome in entry.good.values() if outcome["curve"]]
    x, y, low, high = [], [], [], []
    for together in zip(*curves, strict=False):
        heights = [100 * (point["accuracy"] or 0.0) for point in together]
        x.append(fmean(point[axis] for point in together) * unit)
        y.append(fmean(heights))
        low.append(min(heights))
        high.append(max(heights))
    return x, y, low, high


def _spread(there: Sequence[Entry]) -> bool:
    """Whether bytes are of different orders."""
    amounts = [value.value for entry in there if (value := entry.mean(sent)) and value.value > 0]
    return len(amounts) == len(there) and max(amounts) > 5 * min(amounts)


def _ends(grid: Grid, there: Sequence[Entry]) -> bytes:
    figure = _figure(7.0, 4.6)
    axes = figure.subplots()
    for entry in there:
        x, y = ([measure(outcome) or 0.0 for outcome in entry.good.values()] for measure in (sent, points))
        middle = fmean(x), fmean(y)
        reach = [_reach(at, each) for at, each in zip(middle, (x, y), strict=True)]
        look = {"fmt": _marker(grid, entry), "ms": 8, "capsize": 3, "color": _colour(grid, entry)}
        axes.errorbar(*middle, yerr=reach[1], xerr=reach[0], **look, label=_label(grid, entry))
    if _spread(there):
        _logarithmic(axes)
    axes.set(xlabel="MB sent by all ranks", ylabel="test accuracy, %")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return _png(figure)


def _logarithmic(axes: Any) -> None:
    """With numbers as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 10_000 else f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _time(grid: Grid, there: Sequence[Entry]) -> bytes:
    figure = _figure(8.0, 1.4 + 0.42 * len(there))
    axes = figure.subplots()
    names = [_label(grid, entry) for entry in there]
    begin = [0.0] * len(there)
    for (name, label), colour in zip(PHASES, ("#3a7d3a", "#d98c3a", "#bbbbbb"), strict=True):
        lengths = [found.value if (found := entry.mean(partial(_phase, (name, label)))) else 0.0 for entry in there]
        axes.barh(names, lengths, left=begin, color=colour, label=label, height=0.65)
        begin = [left + length for left, length in zip(begin, lengths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05 * max(begin) or 1.0)
    axes.set_xlabel(AXES[0][1])
    axes.grid(alpha=0.3, axis="x")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return _png(figure)


def _phase(phase: tuple[str, str], outcome: Mapping[str, Any]) -> float | None:
    return (outcome.get("phases") or {}).get(phase[0])


def _reach(middle: float, values: Sequence[float]) -> list[list[float]]:
    """How far ``values`` reach below and above their mean; rounding may have put the mean of equal ones beside them."""
    return [[max(0.0, middle - min(values))], [max(0.0, max(values) - middle)]]


def _staleness(grid: Grid, late: Sequence[Entry]) -> bytes:
    figure = _figure(7.0, 1.2 + 1.5 * len(late))
    panels = figure.subplots(len(late), 1, sharex=True, squeeze=False)[:, 0]
    for axes, entry in zip(panels, late, strict=True):
        told = entry.staleness() or {}
        delays = {int(delay): count / told["pushes"] for delay, count in told["histogram"].items()}
        axes.bar(list(delays), [100 * share for share in delays.values()], width=0.9, color=_colour(grid, entry))
        title = f"{_label(grid, entry)}: median {told['median']}, 95th percentile {told['of_95']}"
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel("gradients, %")
    panels[-1].set_xlabel("updates by other workers before the gradient was applied")
    return _png(figure)


def _label(grid: Grid, entry: Entry) -> str:
    """A name without markup, and how many of its runs have a result if not all."""
    name = entry.label.replace("$", r"\$")  # otherwise a formula
    name = f" {name}" if name.startswith("_") else name  # otherwise left out of the legend
    return name if entry.whole else f"{name} ({len(entry.good)} of {len(grid.seeds)} runs)"


def _colour(grid: Grid, entry: Entry) -> str:
    """The same in all pictures."""
    return f"C{[contender.label for contender in grid.contenders].index(entry.label) % 10}"


def _marker(grid: Grid, entry: Entry) -> str:
    """The same in all pictures, for readers who cannot tell the colours apart; another one where colours repeat."""
    number = [contender.label for contender in grid.contenders].index(entry.label)
    return MARKERS[(number + number // 10) % len(MARKERS)]


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _png(figure: Any) -> bytes:
    page = io.BytesIO()
    figure.savefig(page, dpi=110, format="png", metadata={"Software": None})
    return page.getvalue()
