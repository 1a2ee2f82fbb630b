"""The report of a comparison as blocks: headings, paragraphs, lists, tables and pictures, in the order of reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpiddl.bench.intervals import Mean
from mpiddl.compare.advice import Advice
from mpiddl.compare.grid import Contender, Grid
from mpiddl.compare.plain import plain
from mpiddl.compare.plots import Picture
from mpiddl.compare.words import NONE, percent, told
from mpiddl.strategies import describe


class Heading(NamedTuple):
    text: str
    level: int = 2


class Paragraph(NamedTuple):
    text: str


class Items(NamedTuple):
    """A list; the first entry stands out if it is the ``answer``."""

    texts: Sequence[str]
    answer: bool = False


class Table(NamedTuple):
    """Cells as texts; ``marked`` is the row that was recommended."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: int | None = None


class Code(NamedTuple):
    text: str


Block = Heading | Paragraph | Items | Table | Code | Picture

INTERVALS = ("a ± b: a is the mean of the runs with different seeds; the mean of very many would be expected between a - b "
             "and a + b, 19 times of 20 (a 95 % interval of Student's t). Few seeds make b large; one seed has none. A "
             "difference whose interval holds 0, one smaller than its b, may be chance: it is within noise.")

TERMS = ("A model is a list of numbers, its parameters. In a step each worker takes its part of a batch of rows, and "
         "computes how the parameters should change to get these rows right: a gradient. An epoch is one pass over the "
         "training rows. Some rows are never trained on: validation rows, looked at after every epoch, and test rows, "
         "looked at once, when the model is finished.")

NAMES = ("Behind a name stand its settings: after the colon those of the strategy, in brackets those of its steps, such as the "
         "learning rate, where they are not the ones that all share.")

READING = (
    ("accuracy", "share of the test rows that the finished model gets right, in %"),
    ("against ...", "accuracy minus that of the baseline, in points (of a %), over runs with the same seed"),
    ("to ...", "seconds of training until that share of the validation rows was right. They are looked at after every "
               "epoch, so times are known to an epoch only. \"Not reached\": they never were; \"2 of 3\": not with every "
               "seed"),
    ("seconds", "of training, of the rank (a worker's process) that took longest; looking at validation and test rows is "
                "left out"),
    ("MB sent", "all that the strategy had ranks send to each other, each message counted once. What a collective operation "
                "of the MPI library sends is not seen from outside, and entered as the least that it can send; 0 where "
                "ranks share their memory"),
    ("computing", "share of the ranks' seconds in which they computed, in %. The rest went to messages and to waiting for "
                  "others"),
    ("egress, ingress", "MB that the links of all hosts sent and received, by the kernel's counters, with headers and all "
                        "that the MPI library adds, from the first step to the last; \"-\" where there are no links"),
    ("staleness", "how late gradients are: how many updates others made between a worker's taking the parameters and its "
                  "gradient's being applied to them. The median, and what 95 % do not pass. \"-\": ranks step together, so "
                  "that there are none"),
    ("distance", "how far the parameters of the ranks have grown apart when the validation rows are looked at: the distance "
                 "from the one model that they stand for (quadratic mean), in % of that model's size. 0: all have the same, "
                 "as workers at their own pace have, too, that have just met"),
)  # fmt: skip
"""What the columns mean, in their order."""


def report(grid: Grid, rows: Sequence[Mapping[str, Any]], advice: Sequence[Advice],
           pictures: Mapping[int, Sequence[Picture]] | None, place: str, about: Mapping[str, str], command: str) -> list[Block]:
    """The whole report.

    Parameters
    ----------
    rows : of `mpiddl.compare.figures.rows`
    advice : for each number of workers
    pictures : by number of workers; None without matplotlib
    place : where the runs took place, in words
    about : further facts by name
    command : what makes this report
    """
    blocks: list[Block] = [Heading(f"Which strategy for {grid.shared_job().data}?", 1), *_opening(grid, place)]
    blocks.append(Heading("In short"))
    for each in advice:
        if len(advice) > 1:
            blocks.append(Heading(_workers(each.workers), 3))
        blocks.append(Items(each.reasons, answer=each.choice is not None))
    described = [(each.label, plain(each.spec)) for each in grid.contenders]
    blocks += [Heading("The strategies"), Paragraph(NAMES), Table(("strategy", "what it does"), described)]
    blocks += [Heading("The figures"), Paragraph(INTERVALS)]
    for each in advice:
        there = [row for row in rows if row["workers"] == each.workers]
        blocks += [Heading(f"{_workers(each.workers)}: what it gives, and costs", 3), _table(grid, there, each.choice)]
        blocks += [Heading(f"{_workers(each.workers)}: what happened meanwhile", 3), _meanwhile(there, each.choice)]
    if any(row["failed"] for row in rows):
        blocks.append(Paragraph("What the failed runs printed is in the folder failed, beside this report."))
    blocks += [Heading("What the columns tell", 3), Table(("column", "what it tells"), READING), Heading("Pictures")]
    for each in advice:
        blocks += [Heading(_workers(each.workers), 3)] if len(advice) > 1 and pictures else []
        blocks += (pictures or {}).get(each.workers, [])
    if pictures is None:
        blocks.append(Paragraph("There are no pictures: matplotlib is not installed (pip install 'mpiddl[plot]')."))
    blocks += [Heading("The job"), Table(("setting", "value"), _job(grid, about))]
    blocks.append(Table(("strategy", "with all its parameters"), [(each.label, _in_full(each)) for each in grid.contenders]))
    return [*blocks, Paragraph("This report again, or the runs that are missing:"), Code(command)]


def _opening(grid: Grid, place: str) -> list[Block]:
    """What was done, for somebody who comes to it new."""
    job = grid.shared_job()
    counts = " and ".join(filter(None, [", ".join(map(str, grid.workers[:-1])), str(grid.workers[-1])]))
    budget = {"samples": "{:,.0f} samples", "seconds": "{:g} seconds", "bytes": "{:,.0f} bytes sent"}
    equal = budget[grid.budget[0]].format(grid.budget[1]) if grid.budget else f"{job.epochs} passes over the training rows"
    text = (f"Several workers train one model on one data set, {job.data}. They have to agree on that model, and a strategy is "
            f"how: what they send each other, and when. Here {len(grid.contenders)} of them do the same job {place}, with "
            f"{counts} workers, an equal budget of {equal} and {_seeds(len(grid.seeds))}: a seed decides on the first weights "
            "and the order of the samples, and is the same for all strategies.")
    return [Paragraph(text), Paragraph(TERMS)]


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds each"


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


def _table(grid: Grid, rows: Sequence[Mapping[str, Any]], choice: str | None) -> Table:
    target = [f"to {percent(grid.target)}, s"] if grid.target else []
    heads = ["strategy", "accuracy, %", f"against {grid.baseline}, points", *target, "seconds", "MB sent"]
    return Table(heads, [_texts(grid, row) for row in rows], _marked(rows, choice))


def _meanwhile(rows: Sequence[Mapping[str, Any]], choice: str | None) -> Table:
    heads = ["strategy", "computing, %", "egress, MB", "ingress, MB", "staleness: median, 95 %", "distance, %"]
    return Table(heads, list(map(_texts_meanwhile, rows)), _marked(rows, choice))


def _marked(rows: Sequence[Mapping[str, Any]], choice: str | None) -> int | None:
    return next((number for number, row in enumerate(rows) if row["strategy"] == choice), None)


def _texts(grid: Grid, row: Mapping[str, Any]) -> list[str]:
    label = row["strategy"] + _trouble(row)
    target = [_until_target(grid, row)] if grid.target else []
    gap = row["difference"]
    against = "baseline" if row["strategy"] == grid.baseline else _mean(gap, "+")
    return [label, _mean(row["accuracy"]), against, *target, _mean(row["seconds"]), _mean(row["sent_mb"])]


def _texts_meanwhile(row: Mapping[str, Any]) -> list[str]:
    late = row["staleness"]
    return [row["strategy"], *(_mean(row[name]) for name in ("computing", "egress_mb", "ingress_mb")),
            f"{late['median']}, {late['of_95']}" if late else NONE, _mean(row["distance"])]  # fmt: skip


def _trouble(row: Mapping[str, Any]) -> str:
    """What of the seeds has no result."""
    parts = [f"{len(row['diverged'])} diverged"] if row["diverged"] else []
    parts += [f"{len(row['failed'])} failed: {next(iter(row['failed'].values()))}"] if row["failed"] else []
    parts += [f"{len(row['missing'])} not run"] if row["missing"] else []
    return f" ({'; '.join(parts)})" if parts else ""


def _until_target(grid: Grid, row: Mapping[str, Any]) -> str:
    of, reached = len(row["seeds"]), row["reached"]
    if not of:
        return NONE
    if not reached:
        return "not reached"
    return _mean(row["seconds_to_target"]) + ("" if reached == of else f" ({reached} of {of})")


def _mean(value: Mapping[str, Any] | None, sign: str = "") -> str:
    return told(Mean(**value) if value else None, sign)


def _in_full(contender: Contender) -> str:
    own = ", ".join(f"{name}={value}" for name, value in contender.own)
    return describe(contender.strategy) + (f" with {own}" if own else "")


def _job(grid: Grid, about: Mapping[str, str]) -> list[tuple[str, str]]:
    job = grid.shared_job().as_dict()
    usual = type(grid.shared_job())().as_dict()
    shown = ("data", "model", "hidden", "epochs", "batch", "optimiser", "rate", "schedule", "validation")
    skipped = ("strategy", "seed")
    names = [name for name in job if name in shown or (job[name] != usual[name] and name not in skipped)]
    settings = {**job, "rate": job["rate"] or f"{grid.shared_job().learning_rate():g} (the usual one)"}
    if settings["optimiser"] == "auto":
        settings["optimiser"] = "that of the strategy, otherwise momentum"
    return [*((name, _value(settings[name])) for name in names), ("seeds", ", ".join(map(str, grid.seeds))), *about.items()]


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
