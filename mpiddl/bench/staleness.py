"""``mpiddl bench staleness``: what late gradients cost, by rule, number of workers and their speeds, in simulated time.

Each rule's rate is chosen first: at a few workers of equal speed the one of the grid that is best on rows held back from
training. That rate is then taken for all numbers of workers and speeds, with other seeds, and measured on the test rows, beside
sequential SGD with Nesterov's momentum, whose rate is chosen likewise. Every run takes the same number of samples.

Finished runs are kept in a `mpiddl.study.journal.Journal`; whatever is in it is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

from mpiddl.bench import staleness_rows
from mpiddl.bench.staleness_runs import PATTERNS, SEQUENTIAL, Run, Runner, read_rule
from mpiddl.errors import UsageError
from mpiddl.layout import check_batch
from mpiddl.study.journal import Journal
from mpiddl.study.pool import Pool

TUNING_SEED = 0
"""No seed that is compared."""


@dataclass(frozen=True)
class Study:
    """What is compared; the first of the ``rules`` with the best of the others. See ``mpiddl bench staleness --help``.

    Raises
    ------
    UsageError
        A value that cannot be taken.
    """

    rules: tuple[str, ...]
    workers: tuple[int, ...]
    patterns: tuple[str, ...]
    seeds: int
    epochs: int
    grid: tuple[float, ...]
    tune_workers: int
    hidden: tuple[int, ...]
    batch: int

    def __post_init__(self) -> None:
        for name in ("rules", "workers", "patterns", "grid", "hidden"):
            values = getattr(self, name)
            if not values or (name != "hidden" and len(set(values)) < len(values)):
                raise UsageError(f"{name}: got {','.join(map(str, values)) or 'none'}, expected one or more values, each only "
                                 "once")
        for rule in self.rules:
            read_rule(rule)
        for pattern in self.patterns:
            if pattern not in PATTERNS:
                raise UsageError(f"patterns: got {pattern!r}, expected one or more of {', '.join(PATTERNS)}")
        for name, values, least in (("workers", self.workers, 2), ("tune_workers", [self.tune_workers], 2),
                                    ("hidden", self.hidden, 1), ("seeds", [self.seeds], 1), ("epochs", [self.epochs], 1),
                                    ("batch", [self.batch], 1)):  # fmt: skip
            if min(values) < least:
                raise UsageError(f"{name}: got {min(values)}, expected {least} or more")
        if not all(0 < rate < float("inf") for rate in self.grid):
            raise UsageError(f"grid: got {','.join(f'{rate:g}' for rate in self.grid)}, expected numbers above 0")

    def tuning(self) -> list[Run]:
        """The runs that rates are chosen by."""
        return [self._run(rule, rate, self.tune_workers, "equal", TUNING_SEED, True)
                for rule, rate in product((SEQUENTIAL, *self.rules), self.grid)]

    def compared(self, rates: dict[str, float]) -> list[Run]:
        """The runs that are compared, of the rules that have a rate: all of a seed before the next one."""
        runs = []
        for seed in range(1, self.seeds + 1):
            if SEQUENTIAL in rates:
                runs.append(self._run(SEQUENTIAL, rates[SEQUENTIAL], 1, "equal", seed, False))
            runs += [self._run(rule, rates[rule], workers, pattern, seed, False)
                     for pattern, workers, rule in product(self.patterns, self.workers, self.rules) if rule in rates]
        return runs

    def _run(self, rule: str, rate: float, workers: int, pattern: str, seed: int, tuning: bool) -> Run:
        if rule == SEQUENTIAL:
            workers, pattern = 1, "equal"
        return Run(rule, rate, workers, pattern, seed, tuning, self.epochs, self.batch, self.hidden)


def run(study: Study, runner: Runner, journal: Journal, jobs: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Do what is not in the journal yet, in ``jobs`` processes; returns the rows of `mpiddl.bench.staleness_rows`.

    Raises
    ------
    UsageError, DataError
        Before the first run, for data that cannot be taken.
    """
    check_batch(study.batch * max(*study.workers, study.tune_workers), runner.parts.tested.train.n)
    tuning = study.tuning()
    planned = len(tuning) + len(study.compared(dict.fromkeys((SEQUENTIAL, *study.rules), 1.0)))
    with Pool(runner, jobs) as pool:
        work = Work(runner, journal, pool, jobs, planned, say)
        work.do(tuning)
        rates = chosen(study, runner, journal)
        for rule, rate in rates.items():
            end = len(study.grid) > 1 and rate in (min(study.grid), max(study.grid))
            say(f"{rule}: rate {rate:g}" + (", an end of the grid: a better one may lie beyond" if end else ""))
        work.do(study.compared(rates))
    return rows(study, runner, journal)


def chosen(study: Study, runner: Runner, journal: Journal) -> dict[str, float]:
    """By rule, the rate that is best on the rows held back, of equals the smallest; only rules whose tuning is complete."""
    rates: dict[str, float] = {}
    runs = study.tuning()
    for rule in (SEQUENTIAL, *study.rules):
        found = {run.rate: journal.find(runner.settings(run)) for run in runs if run.rule == rule}
        accuracies = {rate: outcome["validation_accuracy"] for rate, outcome in found.items() if outcome}
        if len(accuracies) == len(study.grid):
            rates[rule] = max(sorted(accuracies), key=accuracies.__getitem__)
    return rates


def rows(study: Study, runner: Runner, journal: Journal) -> list[dict[str, Any]]:
    """What the runs in the journal say so far."""
    rates = chosen(study, runner, journal)
    reference: dict[int, Any] = {}
    found: dict[staleness_rows.Place, dict[int, Any]] = {}
    for run in study.compared(rates):
        outcome = journal.find(runner.settings(run))
        if outcome:
            of = reference if run.rule == SEQUENTIAL else found.setdefault((run.pattern, run.workers, run.rule), {})
            of[run.seed] = outcome
    return staleness_rows.rows(study.rules, found, reference, rates)


class Work:
    """Does runs and keeps what comes of them; tells how far it is."""

    def __init__(self, runner: Runner, journal: Journal, pool: Pool[Run], jobs: int, planned: int, say: Callable[[str], None]):
        self.runner, self.journal, self.pool, self.jobs, self.planned, self.say = runner, journal, pool, jobs, planned, say
        self.over = 0
        self._seconds: list[float] = []

    def do(self, runs: Sequence[Run]) -> None:
        """All of them that the journal does not have."""
        for run, outcome in self.pool.results(self._missing(runs)):
            self.journal.add(self.runner.settings(run), outcome)
            self.over += 1
            if not outcome["diverged"]:
                self._seconds.append(outcome["seconds"])
            self.say(f"[{self.over}/{self.planned}] {run}: {_result(outcome)}, {outcome['seconds']:.1f} s{self._left()}")

    def _missing(self, runs: Sequence[Run]) -> Iterator[Run]:
        """Another study may do some meanwhile."""
        warm = self.jobs == 1
        for run in runs:
            self.journal.refresh()
            if self.journal.find(self.runner.settings(run)):
                self.over += 1
                continue
            if not warm:
                self.runner.warm({each.rule: each for each in runs}.values())
                warm = True
            yield run

    def _left(self) -> str:
        """An estimate by the runs that this study has done to their end."""
        if not self._seconds:
            return ""
        left = round((self.planned - self.over) * fmean(self._seconds) / self.jobs)
        return f"; about {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"


def _result(outcome: dict[str, Any]) -> str:
    if outcome["diverged"]:
        return "diverged"
    accuracy = outcome["validation_accuracy"] if outcome["test_accuracy"] is None else outcome["test_accuracy"]
    return f"{100 * accuracy:.2f} %"
