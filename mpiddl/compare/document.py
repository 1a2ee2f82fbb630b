"""The report of a comparison as blocks, in the order of reading: the verdict, its picture, the tables, how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mpiddl.bench.intervals import ENOUGH, Mean
from mpiddl.compare.advice import Advice
from mpiddl.compare.grid import Contender, Grid
from mpiddl.compare.plain import plain
from mpiddl.compare.plots import Picture
from mpiddl.compare.words import NONE, counted, listed, percent, told
from mpiddl.strategies import describe

Row = Mapping[str, Any]


class Heading(NamedTuple):
    text: str
    level: int = 2


class Paragraph(NamedTuple):
    text: str


class Items(NamedTuple):
    """A list. ``kind``: "verdict" if its first entry stands out, "warning" if all do."""

    texts: Sequence[str]
    kind: str = ""


class Table(NamedTuple):
    """Cells as texts. ``marked``: the row that is advised. ``flagged``: rows without all their runs. ``words``: of texts, not figures."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: int | None = None
    flagged: Sequence[int] = ()
    words: bool = False


class Code(NamedTuple):
    text: str


Block = Heading | Paragraph | Items | Table | Code | Picture


class Column(NamedTuple):
    """Of a table of figures: its head, what it tells, and the text of a row."""

    head: str
    meaning: str
    text: Callable[[Row], str]


INTERVAL = ("a ± b: a is the mean over the seeds, and b is half the width of its 95 % confidence interval (Student's t). A "
            "difference is within noise if its interval contains 0, that is, if it is smaller than its b.")
RANGE = "a (b to c): a is the mean of two seeds, and b to c is their range. Two seeds are too few for a confidence interval."
ONE = "A figure alone is of a single run. One seed says nothing about noise."

TERMS = ("A model is a list of numbers, its parameters. In a step, each worker takes its part of a batch of rows and computes "
         "a gradient: how the parameters should change to get these rows right. A strategy is how the workers agree on one "
         "model: what they send each other, and when. An epoch is one pass over the training rows. A seed decides the first "
         "parameters and the order of the rows, and is the same for all strategies. Two kinds of rows are never trained on: "
         "validation rows, on which the model is scored after every epoch, and test rows, on which the finished model is scored once.")

CHOSEN = "The choice uses the validation rows. Reported accuracies are those of the test rows, which decide nothing. Step by step:"

STEPS = (
    "Strategies with a result for every seed are candidates.",
    "Of these, strategies as accurate as the best are kept: at most {margin:g} points below it, or within noise.",
    "Of these, strategies that reach the target with every seed are kept, if there are any.",
    "Of these, strategies as fast as the fastest are kept: at most 5 % slower, or within noise, or closer than two validations.",
    "Of these, the strategies that send the fewest bytes are kept (within 5 %), where bytes are known.",
    "Of these, the simplest is advised. The order is: synchronous sums, averages every few steps, late sums, gossip, parameter "
    "servers, strategies of your own.",
)
"""How a strategy is chosen (`mpiddl.compare.choice`)."""

SETTINGS = ("After the colon: parameters of the strategy. In brackets: settings such as the learning rate where they differ "
            "from those that all strategies share.")


def results(grid: Grid, rows: Sequence[Row]) -> list[Column]:
    """The columns of the table of results."""
    partly = any(len(row["seeds"]) < len(grid.seeds) for row in rows)
    runs = Column("runs", "runs with a result, of all that were planned. A run without a result failed, diverged or was not "
                  "run; the means of its strategy are over the other runs", lambda row: _runs(row) if partly else NONE)  # fmt: skip
    against = Column(f"against {grid.baseline}, points", "test accuracy minus that of the baseline, over runs with the same seed",
                     lambda row: _mean(row["difference"], "+"))  # fmt: skip
    target = Column(f"time to {percent(grid.target)}, s", "seconds of training until this share of the validation rows was "
                    "right. Validation takes place after every epoch, so times are known to an epoch. \"Not reached\": with no "
                    "seed. \"2 of 3\": with two of three seeds", _until_target)  # fmt: skip
    return [
        runs,
        Column("validation accuracy, %", "share of the validation rows that the finished model gets right. It decides the choice",
               lambda row: _mean(row["validation"])),
        Column("test accuracy, %", "share of the test rows that the finished model gets right", lambda row: _mean(row["accuracy"])),
        against,
        *([target] if grid.target else []),
        Column("training, s", "duration of the training on the rank (the process of a worker) that took longest, without the "
               "time for validation and test rows", lambda row: _mean(row["seconds"])),
        Column("MB sent", "payload of all messages of the strategy, each counted once. For a collective operation of the MPI "
               "library, which cannot be observed, it is the least that such an operation can send. 0 where ranks share memory",
               lambda row: _mean(row["sent_mb"])),
    ]  # fmt: skip


MEANWHILE = (
    Column("computing, %", "share of the ranks' time spent on computation. The rest is messages and waiting",
           lambda row: _mean(row["computing"])),
    Column("egress, MB", "data that the network links of all hosts sent from the first to the last step, headers included "
           "(kernel counters)", lambda row: _mean(row["egress_mb"])),
    Column("ingress, MB", "the same, received", lambda row: _mean(row["ingress_mb"])),
    Column("staleness", "how late gradients are: the number of updates by other workers between reading the parameters and "
           "applying the gradient computed from them. Median; 95th percentile. \"-\": workers step together",
           lambda row: f"{row['staleness']['median']}; {row['staleness']['of_95']}" if row["staleness"] else NONE),
    Column("distance, %", "how far the parameters of the ranks have moved apart, at the validations: distance from the common "
           "model, in % of that model's norm (root mean square). 0: all ranks hold the same parameters", lambda row: _mean(row["distance"])),
)  # fmt: skip
"""The columns of what happened during training."""


def report(grid: Grid, rows: Sequence[Row], advice: Sequence[Advice], pictures: Mapping[int, Sequence[Picture]] | None,
           place: str, about: Mapping[str, str], command: str) -> list[Block]:
    """The whole report.

    Parameters
    ----------
    rows : of `mpiddl.compare.figures.rows`
    advice : for each number of workers
    pictures : by number of workers, the one that belongs to the verdict first; None without matplotlib
    place : where the runs took place, in words
    about : further facts by name
    command : what makes this report
    """
    several = len(advice) > 1
    blocks: list[Block] = [Heading(f"Which strategy for {grid.shared_job().data}?", 1), Paragraph(_opening(grid, place))]
    for each in advice:
        blocks += [Heading(_workers(each.workers))] if several else []
        blocks.append(Items(each.verdict, "verdict" if each.choice is not None else ""))
        blocks += (pictures or {}).get(each.workers, [])[:1]
        blocks += [Items(each.warnings, "warning")] if each.warnings else []
    for each in advice:
        there, of = [row for row in rows if row["workers"] == each.workers], f", {_workers(each.workers)}" * several
        blocks += [Heading(f"Results{of}"), figures_table(there, each.choice, results(grid, there)), *map(Paragraph, _reading(there))]
        blocks += [Heading(f"During training{of}"), figures_table(there, each.choice, MEANWHILE)]
        blocks += [Heading(f"Notes{of}"), Items(each.notes)] if each.notes else []
    if any(row["failed"] for row in rows):
        blocks.append(Paragraph("The output of failed runs is in the folder failed, beside this report."))
    if pictures is None:
        blocks.append(Paragraph("There are no pictures, because matplotlib is not installed (pip install 'mpiddl[plot]')."))
    for each in advice:
        if more := (pictures or {}).get(each.workers, [])[1:]:
            blocks += [Heading("More pictures" + f", {_workers(each.workers)}" * several), *more]
    return [*blocks, *_measured(grid, rows, about), Paragraph("To make this report again, or to run what is missing:"), Code(command)]


def _opening(grid: Grid, place: str) -> str:
    """What was compared."""
    budget = {"samples": "{:,.0f} samples", "seconds": "{:g} seconds", "bytes": "{:,.0f} bytes sent"}
    equal = budget[grid.budget[0]].format(grid.budget[1]) if grid.budget else counted(grid.shared_job().epochs, "epoch")
    return (f"{len(grid.contenders)} {'strategies' if len(grid.contenders) > 1 else 'strategy'} to train one model on "
            f"{grid.shared_job().data} with {listed(list(map(str, grid.workers)))} worker{'s' * (grid.workers != (1,))}: "
            f"{counted(len(grid.seeds), 'seed')}, a budget of {equal} for each run, {place}.")  # fmt: skip


def _workers(count: int) -> str:
    return counted(count, "worker")


def figures_table(rows: Sequence[Row], choice: str | None, columns: Sequence[Column]) -> Table:
    """A table of figures without the columns that are empty."""
    shown = _filled(rows, columns)
    cells = [[row["strategy"], *(column.text(row) for column in shown)] for row in rows]
    marked = next((number for number, row in enumerate(rows) if row["strategy"] == choice), None)
    flagged = [number for number, row in enumerate(rows) if row["failed"] or row["diverged"] or row["missing"]]
    return Table(["strategy", *(column.head for column in shown)], cells, marked, flagged)


def _filled(rows: Sequence[Row], columns: Sequence[Column]) -> list[Column]:
    return [column for column in columns if any(column.text(row) != NONE for row in rows)]


def _reading(rows: Sequence[Row]) -> list[str]:
    """How to read the figures that there are."""
    seeds = {min(len(row["seeds"]), ENOUGH) for row in rows}
    return [" ".join(text for count, text in ((3, INTERVAL), (2, RANGE), (1, ONE)) if count in seeds)] if seeds - {0} else []


def _measured(grid: Grid, rows: Sequence[Row], about: Mapping[str, str]) -> list[Block]:
    """How it was measured."""
    described = [(each.label, plain(each.strategy)) for each in grid.contenders]
    columns = [(column.head, f"{column.meaning}.") for column in _filled(rows, [*results(grid, rows), *MEANWHILE])]
    return [
        Heading("The strategies"), Table(("strategy", "what it does"), described, words=True), Paragraph(SETTINGS),
        Heading("How it was measured"), Paragraph(TERMS), Paragraph(CHOSEN),
        Items([step.format(margin=grid.margin) for step in STEPS]),
        *([Heading("Columns", 3), Table(("column", "meaning"), columns, words=True)] if columns else []),
        Heading("The job", 3), Table(("setting", "value"), _job(grid, about), words=True),
        Heading("Parameters of the strategies", 3),
        Table(("strategy", "all its parameters"), [(each.label, _in_full(each)) for each in grid.contenders], words=True),
    ]  # fmt: skip


def _runs(row: Row) -> str:
    """How many runs have a result, and what became of the others."""
    lost = {what: len(row[what]) for what in ("diverged", "failed", "missing")}
    parts = [f"{number} {what.replace('missing', 'not run')}" for what, number in lost.items() if number]
    return f"{len(row['seeds'])} of {len(row['seeds']) + sum(lost.values())}" + (f" ({', '.join(parts)})" if parts else "")


def _until_target(row: Row) -> str:
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
    settings = {**job, "rate": job["rate"] or f"{grid.shared_job().learning_rate():g} (default)"}
    facts = [(name, value) for name, value in about.items() if value != NONE]
    return [*((name, _value(settings[name])) for name in names), ("seeds", ", ".join(map(str, grid.seeds))), *facts]


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
