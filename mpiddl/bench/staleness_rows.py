"""Results of ``mpiddl bench staleness``: means, and differences of runs with the same seed, with 95 % intervals.

Fewer than three seeds have a range in place of the interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from mpiddl.bench.staleness_runs import SEQUENTIAL
from mpiddl.errors import UsageError
from mpiddl.study.intervals import Mean, mean, shown
from mpiddl.study.output import Rows

WITHIN = {8: 0.3, 16: 0.8, 32: 2.0}
"""By workers, how many points below the reference are wanted at most."""

HIGHEST_FROM = 8
"""Workers from which more than the best of the others is wanted."""

DRAWN = 12.0
"""Points below the highest that are drawn; who diverges would hide all others."""

COLUMNS = "workers", "rule", "rate", "delay", "seeds", "accuracy", "against", "accuracy", "difference", "wanted", "came"

Outcomes = Mapping[int, Mapping[str, Any]]
"""By seed, what came of a run."""

Place = tuple[str, int, str]
"""Pattern, workers, rule."""


def rows(rules: Sequence[str], found: Mapping[Place, Outcomes], reference: Outcomes,
         rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """At each pattern and number of workers each rule against the reference, and the first against the best of the others.

    Only seeds that both have count; where there are none there is no row.
    """
    places = dict.fromkeys((pattern, workers) for pattern, workers, _ in found)
    return [row for place in places for row in _at(place, rules, found, reference, rates)]


def _at(place: tuple[str, int], rules: Sequence[str], found: Mapping[Place, Outcomes], reference: Outcomes,
        rates: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    pattern, workers = place
    outcomes = {rule: found[pattern, workers, rule] for rule in rules if found.get((pattern, workers, rule))}
    for rule in outcomes:
        wanted = -WITHIN[workers] if rule == rules[0] and workers in WITHIN else None
        yield from _row(place, rule, SEQUENTIAL, outcomes[rule], reference, rates, wanted)
    own = outcomes.get(rules[0], {})
    others = [rule for rule in outcomes if rule != rules[0] and outcomes[rule].keys() & own]
    if others:
        best = max(others, key=lambda rule: fmean(_points(outcomes[rule], sorted(outcomes[rule].keys() & own))))
        yield from _row(place, rules[0], best, own, outcomes[best], rates, 0.0 if workers >= HIGHEST_FROM else None)


def _row(place: tuple[str, int], contender: str, baseline: str, own: Outcomes, other: Outcomes, rates: Mapping[str, float],
         wanted: float | None) -> Iterator[dict[str, Any]]:
    seeds = sorted(own.keys() & other)
    if not seeds:
        return
    ours, theirs = _points(own, seeds), _points(other, seeds)
    accuracy, against = mean(ours), mean(theirs)
    gap = mean([a - b for a, b in zip(ours, theirs, strict=True)])
    yield {
        "case": f"{place[0]}, {place[1]} workers", "pattern": place[0], "workers": place[1], "contender": contender,
        "baseline": baseline, "rate": rates[contender], "baseline_rate": rates[baseline], "seeds": seeds,
        "accuracy": accuracy.value, "interval": accuracy.half, "range": [accuracy.low, accuracy.high],
        "baseline_accuracy": against.value, "baseline_interval": against.half, "baseline_range": [against.low, against.high],
        "difference": gap.value, "difference_interval": gap.half, "difference_range": [gap.low, gap.high],
        "delay": median([own[seed]["delay"] for seed in seeds]),
        "diverged": sum(own[seed]["diverged"] for seed in seeds), "wanted": wanted,
        "came": None if wanted is None else gap.value > wanted,
        "sure": None if wanted is None else gap.half is not None and abs(gap.value - wanted) > gap.half,
    }  # fmt: skip


def _points(outcomes: Outcomes, seeds: Sequence[int]) -> list[float]:
    return [100 * outcomes[seed]["test_accuracy"] for seed in seeds]


def show(rows: Rows) -> None:
    """A table for each pattern of speeds, on standard output."""
    from rich.console import Console
    from rich.table import Table

    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        table = Table(title=f"{pattern} speeds: test accuracy in %, differences in points", title_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in ("rule", "against") else "right")
        workers = None
        for row in rows:
            if row["pattern"] == pattern:
                if workers not in (None, row["workers"]):
                    table.add_section()
                table.add_row(*_cells(row, row["workers"] != workers))
                workers = row["workers"]
        Console(color_system=None, width=128).print(table)


def _cells(row: Mapping[str, Any], first: bool) -> list[str]:
    rule = row["contender"] + (f" ({row['diverged']} diverged)" if row["diverged"] else "")
    wanted = "" if row["wanted"] is None else f"> {row['wanted']:g}"
    came = {None: "", True: "yes", False: "no"}[row["came"]] + ("?" if row["sure"] is False else "")
    return [
        str(row["workers"]) if first else "", rule, f"{row['rate']:g}", f"{row['delay']:g}", str(len(row["seeds"])),
        shown(_mean(row, "accuracy", "")), row["baseline"], shown(_mean(row, "baseline_accuracy", "baseline_")),
        shown(_mean(row, "difference", "difference_"), "+"), wanted, came,
    ]  # fmt: skip


def _mean(row: Mapping[str, Any], name: str, before: str) -> Mean:
    return Mean(row[name], row[f"{before}interval"], len(row["seeds"]), *row[f"{before}range"])


def _bar(row: Mapping[str, Any]) -> tuple[float, float]:
    """How far the bar of a row reaches below and above its accuracy."""
    if row["interval"] is not None:
        return row["interval"], row["interval"]
    low, high = row["range"]
    return max(0.0, row["accuracy"] - low), max(0.0, high - row["accuracy"])


def draw(path: Path, data: str, rows: Rows) -> None:
    """Draw accuracy over workers, a panel for each pattern, with the intervals; needs matplotlib."""
    from matplotlib.figure import Figure

    against = [row for row in rows if row["baseline"] == SEQUENTIAL]
    if not against:
        raise UsageError("plot: got no finished run of the sequential reference, expected at least one: run without --show "
                         "first")
    patterns = list(dict.fromkeys(row["pattern"] for row in against))
    figure = Figure(figsize=(1 + 4.5 * len(patterns), 4.5), layout="constrained")
    grid = figure.subplots(1, len(patterns), sharey=True, squeeze=False)[0]
    for axes, pattern in zip(grid, patterns, strict=True):
        for rule in dict.fromkeys(row["contender"] for row in against):
            line = [row for row in against if (row["contender"], row["pattern"]) == (rule, pattern)]
            bars = list(zip(*map(_bar, line), strict=True))
            axes.errorbar([row["workers"] for row in line], [row["accuracy"] for row in line], bars, fmt="o-", ms=4,
                          capsize=3, label=rule)
        workers = sorted({row["workers"] for row in rows})
        axes.axhline(against[0]["baseline_accuracy"], color="k", ls="--", label=SEQUENTIAL)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="workers", title=f"{data}, {pattern} speeds", xticks=workers, xticklabels=workers)
    highest = max(max(row["accuracy"], row["baseline_accuracy"]) for row in against)
    grid[0].set_ylim(bottom=max(highest - DRAWN, min(row["accuracy"] for row in against) - 1))
    grid[0].set_ylabel("test accuracy, %")
    grid[0].legend(fontsize=8)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"plot: {path} cannot be written ({error}), expected a file name such as staleness.png") from None
