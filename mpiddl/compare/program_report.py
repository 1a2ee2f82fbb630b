"""The verdict and the report on a program that ran with several strategies."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpiddl.compare import html as page
from mpiddl.compare import markdown, plots
from mpiddl.compare.advice import incomplete
from mpiddl.compare.document import INTERVAL, Block, Code, Heading, Items, Paragraph, Table
from mpiddl.compare.numbers import NONE, aligned, counted, listed, told
from mpiddl.compare.plots import Picture
from mpiddl.compare.program_runs import SEED, ProgramStudy
from mpiddl.compare.statistics import Entry, Outcome, paired, seconds, sent
from mpiddl.study.intervals import ENOUGH, Mean
from mpiddl.study.output import environment

SLOWER = 1.05
"""A strategy that takes at most so many times the seconds of the fastest counts as fast as that."""


class Verdict(NamedTuple):
    """For one number of workers: the label that is advised, or None, and the sentences."""

    choice: str | None
    sentences: list[str]


def metric(outcome: Outcome) -> float:
    """What the program printed."""
    return float(outcome["metric"])


def verdict(there: Sequence[Entry], lower: bool, margin: float) -> Verdict:
    """The fastest strategy of those whose metric is as good as the best: within ``margin``, or within noise and closer than
    the best's own runs are to each other."""
    whole = [entry for entry in there if entry.whole]
    out = [f"{entry.label} ({incomplete(entry)})" for entry in there if not entry.whole]
    left = [f"{listed(out)} {'is' if len(out) == 1 else 'are'} left out."] if out else []
    if not whole:
        return Verdict(None, ["No strategy has a result for every seed, so none is advised.", *left])
    sign = -1.0 if lower else 1.0
    best = max(whole, key=lambda entry: sign * _value(entry, metric))
    gaps = {entry.label: paired(entry, best, metric) for entry in whole}
    own = [metric(outcome) for outcome in best.good.values()]
    spread = max(own) - min(own)
    good = [entry for entry in whole if entry is best or ((gap := gaps[entry.label]) is not None and (
        sign * gap.value >= -margin or (gap.seeds > 1 and gap.noise and sign * gap.value >= -spread)))]
    fastest = min(_value(entry, seconds) for entry in good)
    taken = next(entry for entry in good if _value(entry, seconds) <= SLOWER * fastest)
    said = [f"Take {taken.label}: metric {number(taken.mean(metric))}, {told(taken.mean(seconds), unit='s')}, "
            f"{told(taken.mean(sent), unit='MB')} sent."] if len(there) > 1 else [
            f"{taken.label}: metric {number(taken.mean(metric))}, {told(taken.mean(seconds), unit='s')}."]
    if len(good) > 1:
        alike = f"differ by at most {margin:g} or within noise" if margin else "show no clear difference"
        speed = "the fastest" if _value(taken, seconds) == fastest else "at most 5 % slower than the fastest"
        said.append(f"{listed([entry.label for entry in good])} {alike} in the metric; of these, {taken.label} is {speed}.")
    elif len(whole) > 1:
        said.append(f"Its metric is the best; {_gap(next(each for each in whole if each is not best), best)}.")
    if taken is not there[0] and there[0].good:
        times = _value(there[0], seconds) / _value(taken, seconds)
        speed = f"{times:.2f} times as fast" if times >= 1 else f"it takes {1 / times:.2f} times as long"
        said.append(f"{_gap(taken, there[0])}; {speed}.")
    return Verdict(taken.label, [*said, *left])


def _gap(one: Entry, other: Entry) -> str:
    gap = paired(one, other, metric)
    noise = "" if gap is None or gap.seeds == 1 else ", within noise" if gap.noise else ", beyond noise"
    return f"{one.label} against {other.label}: metric {number(gap, '+')}{noise}"


def number(value: Mean | None, sign: str = "") -> str:
    """A metric with its interval or range, formatted as by `told`. Values below 1 have three significant digits.

    Examples
    --------
    >>> from mpiddl.study.intervals import mean
    >>> number(mean([0.00012, 0.00014])), number(mean([1.5])), number(mean([-0.001, -0.002, -0.003]), "+")
    ('0.00013 (0.00012 to 0.00014)', '1.50', '-0.002 ± 0.0025')
    """
    if value is None or not 0 < abs(value.value) < 1:
        return told(value, sign)
    text = f"{value.value:{sign}.3g}"
    if value.half is not None:
        return f"{text} ± {value.half:.2g}"
    return text + (f" ({value.low:{sign}.3g} to {value.high:{sign}.3g})" if value.low != value.high else "")


def _value(entry: Entry, measure: Any) -> float:
    found = entry.mean(measure)
    assert found is not None
    return found.value


def table(there: Sequence[Entry], choice: str | None) -> Table:
    """A line for each strategy."""
    gaps = [number(paired(entry, there[0], metric), "+") if entry is not there[0] else NONE for entry in there]
    rows = [[entry.label, number(entry.mean(metric)), gap, told(entry.mean(seconds)), told(entry.mean(sent)),
             str(len(entry.good))] for entry, gap in zip(there, gaps, strict=True)]
    marked = next((number for number, entry in enumerate(there) if entry.label == choice), None)
    flagged = [number for number, entry in enumerate(there) if not entry.whole]
    heads = ["strategy", "metric", f"difference from {there[0].label}", "seconds", "MB sent", "runs"]
    return Table(heads, rows, marked, flagged)


def write(study: ProgramStudy, margin: float, command: str) -> tuple[list[Verdict], str, Path]:
    """Write report.html, report.md and report.json; returns the verdicts, what to print, and the path of the page."""
    runs, store = study.runs, study.store
    by_workers = {workers: study.entries(workers) for workers in runs.workers}
    verdicts = [verdict(there, runs.lower, margin) for there in by_workers.values()]
    blocks: list[Block] = [Heading(f"Which strategy for {runs.program.name}?", 1), Paragraph(
        f"{listed([each.label for each in runs.contenders])}: {counted(len(runs.seeds), 'run')} each, {study.place.words()}. "
        f"The metric is what {runs.metric!r} finds last in the output; a {'lower' if runs.lower else 'higher'} one is better.")]
    spoken = []
    for (workers, there), each in zip(by_workers.items(), verdicts, strict=True):
        name = counted(workers, "rank")
        blocks += [Heading(name), *([Items(each.sentences, "verdict")] if each.sentences else []), table(there, each.choice)]
        if workers > 1 and plots.available() and any(entry.good for entry in there):
            blocks.append(_picture(store, there, workers))
        cells = table(there, each.choice)
        lines = aligned([cells.heads, *cells.rows], [not column for column in range(len(cells.heads))])
        spoken += [f"{name}:", *each.sentences, "", *("  ".join(line).rstrip() for line in lines), ""]
    if len(runs.seeds) > 1 and not any(SEED in each for each in runs.args):
        blocks.append(Paragraph(f"The program was given no seed ({SEED} in its arguments): its runs are repetitions."))
    facts = environment()
    names = [name for name in ("processor", "cores", "mpiddl", "python", "torch") if name in facts]
    blocks += [Paragraph("Seconds are those of the program on all ranks, without the start of Python."),
               *([Paragraph(INTERVAL)] if len(runs.seeds) >= ENOUGH else []),
               Paragraph(f"Machine: {', '.join(f'{name} {facts[name]}' for name in names)}."),
               Paragraph("To make this report again, or to run what is missing:"), Code(command)]
    rows = [{"strategy": entry.label, "workers": workers, "good": {str(seed): dict(each) for seed, each in entry.good.items()},
             "failed": {str(seed): why for seed, why in entry.failed.items()}, "diverged": list(entry.diverged)}
            for workers, there in by_workers.items() for entry in there]
    plain = {"program": [str(runs.program), *runs.args], "metric": runs.metric, "place": study.place.about,
             "environment": facts, "rows": rows, "advice": [each._asdict() for each in verdicts]}
    store.write("report.json", json.dumps(plain, indent=1) + "\n")
    store.write("report.md", markdown.render(blocks))
    return verdicts, "\n".join(spoken), store.write("report.html", page.render(blocks))


def _picture(store: Any, there: Sequence[Entry], workers: int) -> Picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    axes = figure.subplots()
    for entry, marker in zip(there, plots.MARKERS * len(there), strict=False):
        if entry.good:
            x, y = ([measure(outcome) for outcome in entry.good.values()] for measure in (seconds, metric))
            axes.plot(x, y, marker, label=entry.label.replace("$", r"\$"), alpha=0.7)
    axes.set(xlabel="seconds", ylabel="metric")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png", metadata={"Software": None})
    caption = "The metric of each run, by its seconds. Further left is faster."
    found = Picture(f"metric-{workers}.png", caption, drawn.getvalue())
    store.write(found.name, found.png)
    return found
