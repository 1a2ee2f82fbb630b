"""The report of a comparison as blocks, in the order of reading: the verdict, its picture, the tables, how it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpiddl.compare.advice import Advice
from mpiddl.compare.choice import NOISE_MOST
from mpiddl.compare.columns import MEANWHILE, Column, Row, filled, results
from mpiddl.compare.grid import Contender, Grid
from mpiddl.compare.numbers import NONE, counted, listed
from mpiddl.compare.plots import Picture
from mpiddl.compare.strategy_texts import learning_rate, plain
from mpiddl.strategies import describe
from mpiddl.study.intervals import ENOUGH


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
    """Cells as texts.

    marked : the row that is advised.
    flagged : rows without all their runs.
    words : whether it holds sentences, not figures.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: int | None = None
    flagged: Sequence[int] = ()
    words: bool = False


class Code(NamedTuple):
    text: str


Block = Heading | Paragraph | Items | Table | Code | Picture


INTERVAL = ("a ± b: a is the mean over the seeds, and b is half the width of its 95 % confidence interval (Student's t). A "
            "difference is within noise if its interval contains 0, that is, if it is smaller than its b.")
RANGE = "a (b to c): a is the mean of two seeds, and b to c is their range. Two seeds are too few for a confidence interval."
ONE = "A figure alone is of a single run. One seed says nothing about noise."

TERMS = ("A model is a list of numbers, its parameters. In a step, each worker takes its part of a batch of rows and computes "
         "a gradient: how the parameters should change to get these rows right. A strategy is how the workers agree on one "
         "model: what they send each other, and when. An epoch is one pass over the training rows. A seed decides the first "
         "parameters and the order of the rows, and is the same for all strategies. Two kinds of rows are never trained on: "
         "validation rows, on which the model is scored during the training, and test rows, on which the finished model is "
         "scored once.")

CHOSEN = "The choice uses the validation rows. Reported accuracies are those of the test rows, which decide nothing. The steps:"

STEPS = (
    "Strategies with a result for every seed are candidates, but not a reference with its own number of workers.",
    "Of these, strategies as accurate as the best are kept: at most {margin:g} points below it, or within noise and at most "
    "{most:g} points below it.",
    "Of these, strategies that reach the target with every seed are kept, if there are any.",
    "Of these, strategies as fast as the fastest are kept: at most 5 % slower, within noise, or closer than two validations.",
    "Of these, the strategies that send the fewest bytes are kept (within 5 %), where bytes are known.",
    "Of these, the simplest is advised. The order is: synchronous sums, averages every few steps, late sums, gossip, parameter "
    "servers, strategies of your own.",
)
"""How a strategy is chosen (`mpiddl.compare.choice`)."""

RATES = ("Before the comparison, each of these strategies trained once with each rate, on {} workers (a reference on its own) "
         "and with a seed that is not compared. The accuracy on the validation rows chose the rate.")

SETTINGS = ("After the colon: parameters of the strategy. In brackets: settings such as the learning rate where they differ "
            "from those that all strategies share.")


def report(grid: Grid, rows: Sequence[Row], advice: Sequence[Advice], pictures: Mapping[int, Sequence[Picture]] | None,
           place: str, about: Mapping[str, str], command: str) -> list[Block]:
    """The whole report.

    Parameters
    ----------
    rows : of `mpiddl.compare.statistics.rows`
    advice : for each number of workers
    pictures : by number of workers, the one that belongs to the verdict first; None without matplotlib
    place : where the runs took place, in words
    about : further facts by name
    command : what makes this report
    """
    there = {each.workers: [row for row in rows if row["workers"] == each.workers] for each in advice}
    several = len(advice) > 1
    blocks: list[Block] = [Heading(f"Which strategy for {grid.shared_job().data}?", 1), Paragraph(_opening(grid, place))]
    for each in advice:
        blocks += [Heading(_workers(each.workers))] if several else []
        blocks += _verdict(each, (pictures or {}).get(each.workers, [])[:1])
    for each in advice:
        blocks += _figures(grid, there[each.workers], each, f", {_workers(each.workers)}" * several)
    if any(row["failed"] for row in rows):
        blocks.append(Paragraph("The output of failed runs is in the folder failed, beside this report."))
    for each in advice:
        if more := (pictures or {}).get(each.workers, [])[1:]:
            blocks += [Heading("More pictures" + f", {_workers(each.workers)}" * several), *more]
    if pictures is None:
        blocks.append(Paragraph("There are no pictures, because matplotlib is not installed (pip install 'mpiddl[plot]')."))
    again = Paragraph("To make this report again, or to run what is missing:")
    return [*blocks, *_measured(grid, rows, about), again, Code(command)]


def _verdict(advice: Advice, picture: Sequence[Picture]) -> list[Block]:
    warnings = [Items(advice.warnings, "warning")] if advice.warnings else []
    return [Items(advice.verdict, "verdict" if advice.choice is not None else "warning"), *picture, *warnings]


def _figures(grid: Grid, rows: Sequence[Row], advice: Advice, of: str) -> list[Block]:
    meanwhile = figures_table(rows, advice.choice, MEANWHILE)
    blocks: list[Block] = [Heading(f"Results{of}"), figures_table(rows, advice.choice, results(grid, rows))]
    blocks += map(Paragraph, _reading(rows))
    if len(meanwhile.heads) > 1:
        blocks += [Heading(f"During training{of}"), meanwhile]
    if advice.notes:
        blocks += [Heading(f"Notes{of}"), Items(advice.notes)]
    return blocks


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
    shown = filled(rows, columns)
    cells = [[row["strategy"], *(column.text(row) for column in shown)] for row in rows]
    marked = next((number for number, row in enumerate(rows) if row["strategy"] == choice), None)
    flagged = [number for number, row in enumerate(rows) if row["failed"] or row["diverged"] or row["missing"]]
    return Table(["strategy", *(column.head for column in shown)], cells, marked, flagged)


def _reading(rows: Sequence[Row]) -> list[str]:
    """How to read the figures that there are."""
    seeds = {min(len(row["seeds"]), ENOUGH) for row in rows}
    return [" ".join(text for count, text in ((3, INTERVAL), (2, RANGE), (1, ONE)) if count in seeds)] if seeds - {0} else []


def _measured(grid: Grid, rows: Sequence[Row], about: Mapping[str, str]) -> list[Block]:
    """How it was measured."""
    described = [(each.label, plain(each.strategy)) for each in grid.contenders]
    columns = [(column.head, f"{column.meaning}.") for column in filled(rows, [*results(grid, rows), *MEANWHILE])]
    in_full = [(each.label, _in_full(each)) for each in grid.contenders]
    blocks: list[Block] = [
        Heading("The strategies"), Table(("strategy", "what it does"), described, words=True), Paragraph(SETTINGS),
        Heading("How it was measured"), Paragraph(TERMS), Paragraph(CHOSEN),
        Items([step.format(margin=grid.margin, most=max(NOISE_MOST, grid.margin)) for step in STEPS]),
    ]  # fmt: skip
    if tuned := [learning_rate(each) for each in grid.contenders if each.rates]:
        blocks += [Heading("Learning rates", 3), Paragraph(RATES.format(grid.tune_workers)), Items(tuned)]
    if columns:
        blocks += [Heading("Columns", 3), Table(("column", "meaning"), columns, words=True)]
    return [
        *blocks, Heading("The job", 3), Table(("setting", "value"), _job(grid, about), words=True),
        Heading("Parameters of the strategies", 3), Table(("strategy", "all its parameters"), in_full, words=True),
    ]  # fmt: skip


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
    if settings["optimiser"] == "auto":
        settings["optimiser"] = "that of the strategy, otherwise momentum"
    if grid.batch_per_worker:
        settings["batch"] = f"{grid.batch_per_worker} for each worker"
    facts = [(name, value) for name, value in about.items() if value != NONE]
    return [*((name, _value(settings[name])) for name in names), ("seeds", ", ".join(map(str, grid.seeds))), *facts]


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
