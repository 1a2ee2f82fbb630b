"""What the runs of ``mpiddl bench gossip`` say: seconds and bytes up to an accuracy, and bytes counted beside the links' own.

All are medians of the turns. A part of the time that is saved is the median of turns, in each of which both had the same seed.
Counters of links hold headers of Ethernet, IPv4 and TCP (with time stamps), 66 bytes for each packet that the kernel hands on,
acknowledgements included; what is left without them is payload, which holds what the MPI library adds to messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

from mpiddl.errors import UsageError
from mpiddl.study.output import Rows
from mpiddl.testbed import Link

HEADER_BYTES = 14 + 20 + 32

SAVED = 0.52
"""Part of the time that the second strategy is wanted to save."""

COUNTED = 0.02
"""By which part bytes counted may differ from the links' payload."""

STEPS, SECONDS, BYTES, MESSAGES, ACCURACY = range(5)
"""Of a point."""

Outcomes = Mapping[int, Mapping[str, Any]]
"""By turn, what came of a run."""

RHYTHM = "computing", "step", "wire", "share"
"""Of the baseline: `mpiddl.bench.gossip_runs.Rhythm`."""

TO = "to", "strategy", "turns", "s", "time saved", "steps", "MB a rank", "of the bytes"
CARRIED = "strategy", "counted MB", "messages", "link MB", "of counted", "payload MB", "of counted"


def rows(targets: Sequence[float], found: Mapping[str, Outcomes]) -> Iterator[dict[str, Any]]:
    """A row for each target and strategy; the first strategy is the baseline."""
    names = list(found)
    for target in targets:
        for number, name in enumerate(found if all(found.values()) else ()):
            own, base = ([arrival(outcomes, target) for outcomes in found[which].values()] for which in (name, names[0]))
            seconds, steps, sent = (_finite(median(point[which] for point in own)) for which in (SECONDS, STEPS, BYTES))
            baseline = _finite(median(point[SECONDS] for point in base))
            saved = _finite(1 - median(_part(mine[SECONDS], theirs[SECONDS]) for mine, theirs in zip(own, base, strict=True)))
            ranks = len(next(iter(found[name].values()))["sent"])
            whole = _finite(median(point[BYTES] for point in base))
            yield {
                "case": f"to {target:.4g}", "target": target, "contender": name, "baseline": names[0], "seconds": seconds,
                "baseline_seconds": baseline, "ratio": baseline / seconds if baseline and seconds else None, "saved": saved,
                "wanted": SAVED if number == 1 else None, "steps": steps, "sent_bytes": sent and sent / ranks,
                "sent_share": sent / whole if sent is not None and whole else None, "turns": len(own),
                "reached": sum(isfinite(point[SECONDS]) for point in own), "ranks": ranks,
                **{what: median(outcome[what] for outcome in found[names[0]].values()) for what in RHYTHM},
                **_carried(found[name], ranks),
            }  # fmt: skip


def arrival(outcome: Mapping[str, Any], target: float) -> Sequence[float]:
    """The first point at or above an accuracy; infinitely far if there is none."""
    return next((point for point in outcome["points"] if point[ACCURACY] >= target), [inf] * 5)


def _part(mine: float, theirs: float) -> float:
    return mine / theirs if isfinite(theirs) else -inf if isfinite(mine) else inf


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _carried(outcomes: Outcomes, ranks: int) -> dict[str, Any]:
    """What all runs of a strategy have sent, by our count and by the links', in bytes a rank and run; where ranks share a host,
    not all that they send is on a link, and nothing is told."""
    links = [Link(*link) for outcome in outcomes.values() for link in outcome["links"]]
    if len(links) < ranks * len(outcomes):
        return {}
    counted = sum(sum(outcome["sent"]) for outcome in outcomes.values())
    on_links = sum(link.sent_bytes for link in links)
    payload = on_links - HEADER_BYTES * sum(link.sent_packets for link in links)
    messages = sum(sum(outcome["messages"]) for outcome in outcomes.values())
    return {"counted_bytes": counted / len(links), "link_bytes": on_links / len(links), "payload_bytes": payload / len(links),
            "messages": messages / len(links), "link_ratio": on_links / counted if counted else None,
            "payload_ratio": payload / counted if counted else None}


def brief(outcome: Mapping[str, Any]) -> str:
    """A run in a line."""
    last, ranks = outcome["points"][-1], len(outcome["sent"])
    sent = last[BYTES] / ranks / 1e6
    return f"{last[ACCURACY]:.2%} after {last[STEPS]} steps, {last[SECONDS]:.1f} s, {sent:.1f} MB a rank"


def show(rows: Rows) -> None:
    """Two tables on standard output: up to each accuracy, and what links carried."""
    from rich.console import Console
    from rich.table import Table

    console = Console(color_system=None, width=128)
    table = Table(title=f"medians, against {rows[0]['baseline']}", title_justify="left")
    for name in TO:
        _add_column(table, name)
    case = None
    for row in rows:
        if case not in (None, row["case"]):
            table.add_section()
        reached = f"{row['reached']}/{row['turns']}" if row["reached"] < row["turns"] else str(row["turns"])
        table.add_row(f"{row['target']:.4g}" if row["case"] != case else "", row["contender"], reached,
                      _cell(row["seconds"], ".1f"), _cell(row["saved"], ".0%"), _cell(row["steps"], ".0f"),
                      _cell(row["sent_bytes"], ".1f", 1e6), _cell(row["sent_share"], ".3f"))
        case = row["case"]
    console.print(table)
    carried = [row for row in rows if row["case"] == rows[0]["case"] and row.get("link_bytes")]
    if carried:
        table = Table(title="sent in a whole run, a rank", title_justify="left")
        for name in CARRIED:
            _add_column(table, name)
        for row in carried:
            table.add_row(row["contender"], _cell(row["counted_bytes"], ".2f", 1e6), f"{row['messages']:.0f}",
                          _cell(row["link_bytes"], ".2f", 1e6), _cell(row["link_ratio"], ".2%"),
                          _cell(row["payload_bytes"], ".2f", 1e6), _cell(row["payload_ratio"], ".2%"))
        console.print(table)


def _add_column(table: Any, name: str) -> None:
    left = name == "strategy"
    table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=not left)


def _cell(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else format(value / unit, form)


def sentences(rows: Rows) -> Iterator[str]:
    """Whether what is wanted came."""
    wanted = [row for row in rows if row["wanted"]]
    if wanted:
        told = ", ".join(f"{_cell(row['saved'], '.0%')} to {row['target']:.4g}" for row in wanted)
        missed = [f"{row['target']:.4g}" for row in wanted if row["saved"] is None or row["saved"] < row["wanted"]]
        came = f"not reached to {', '.join(missed)}" if missed else "reached"
        yield (f"time that {wanted[0]['contender']} saves where {wanted[0]['share']:.0%} of a step of {wanted[0]['baseline']} "
               f"is communication: {told}; expected {SAVED:.0%}: {came}")
    ratios = {row["contender"]: row["payload_ratio"] for row in rows if row.get("payload_ratio")}
    if ratios:
        worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
        near = abs(ratios[worst] - 1) <= COUNTED
        yield (f"payload on the links: {ratios[worst]:.2%} of what is counted where they differ most, with {worst}; "
               f"expected within {COUNTED:.0%}: {'reached' if near else 'not reached'}")


def draw(path: Path, title: str, rows: Rows) -> None:
    """Seconds up to each accuracy; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["contender"] for row in rows):
        points = [(row["seconds"], row["target"]) for row in rows if row["contender"] == name and row["seconds"] is not None]
        if points:
            axes.semilogx(*zip(*points, strict=True), "o-", ms=4, label=name)
    axes.set(xlabel="seconds", ylabel="validation accuracy", title=title)
    axes.legend(fontsize=7)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"plot: {path} cannot be written ({error}), expected a file name such as gossip.png") from None
