"""The file of ``mpiddl compare``, read and checked, and the cells of its grid.

    [train]                    settings of `mpiddl train` that all runs share
    [compare]                  see `KEYS`
    strategies = ["two-step", "local-sgd:period=8", {strategy = "asgd", rates = [0.01, 0.02, 0.04]}]
    workers = [4, 8]
    seeds = 3
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, isfinite, lcm
from pathlib import Path
from typing import Any, NamedTuple

from mpiddl.errors import UsageError
from mpiddl.layout import DEFAULT_SHARDS
from mpiddl.strategies import Strategy, describe, make_strategy
from mpiddl.training.builders import with_optimiser
from mpiddl.training.job import FIELDS, Job, check_names, make_job, read_toml, without_aliases
from mpiddl.user_code import is_reference

KEYS = {
    "strategies": "names as for --strategy, or tables of a name and settings of its own",
    "workers": "number of ranks that compute",
    "seeds": "number of runs of each strategy, or a list of seeds",
    "samples": "budget: samples of all ranks together; by default those of [train]'s epochs",
    "seconds": "budget: seconds of a run, unless its epochs end earlier",
    "bytes": "budget: bytes sent by all ranks, unless the epochs end earlier",
    "rates": "learning rates to try for strategies without a rate of their own; the validation rows choose one for each",
    "tune_workers": "number of workers in the runs that choose the learning rates; by default the first of `workers`",
    "batch_per_worker": "rows of each worker in a step, instead of [train]'s batch of all workers together",
    "target": "accuracy on the validation rows, 0 to 1; the time to reach it is reported",
    "baseline": "the strategy that the others are compared with; by default the first",
    "margin": "points of accuracy that count as equal",
    "limit": "seconds after which a run is ended and counts as failed",
}
"""The keys of ``[compare]``, and what they mean."""

BUDGETS = "samples", "seconds", "bytes"

NOT_SHARED = {"strategy": "strategies", "seed": "seeds", "simulate": "--simulate", "max_steps": "samples",
              "max_seconds": "seconds", "max_bytes": "bytes", "target_accuracy": "target"}  # fmt: skip
"""Settings of a training that the comparison sets itself, and the key or flag for each."""

OWN = "optimiser", "rate", "momentum", "weight_decay", "clip", "schedule", "warmup", "step_epochs", "step_factor", "scale_rate"
"""Settings of the optimiser, which may differ between strategies. The task and the budget are the same for all."""

MOST_CONTENDERS, MOST_WORKERS, MOST_SEEDS, MOST_CELLS = 100, 1024, 1000, 100_000

TUNING_SEED = 0
"""Seed of the runs that choose learning rates. It is not one of the compared seeds."""


class Contender(NamedTuple):
    """A strategy in a comparison.

    label : its name in tables.
    spec : its name for `make_strategy`.
    own : its own settings of a training, with values; a learning rate that was chosen from ``rates`` too.
    rates : learning rates to try.
    workers : number of workers of a reference, whatever the number of the others; 0: theirs.
    """

    label: str
    spec: str
    own: tuple[tuple[str, Any], ...] = ()
    rates: tuple[float, ...] = ()
    workers: int = 0

    @property
    def settled(self) -> bool:
        """Whether the learning rate is known."""
        return not self.rates or "rate" in dict(self.own)

    def at(self, rate: float) -> Contender:
        """The same with a learning rate."""
        return self._replace(own=(*self.own, ("rate", rate)))

    @property
    def strategy(self) -> Strategy:
        return make_strategy(self.spec)

    @property
    def identity(self) -> str:
        """What tells this strategy from others: its name and parameters, and the text itself where it is a user's own."""
        return describe(self.strategy) + f" of {self.spec}" * is_reference(self.spec)


class Cell(NamedTuple):
    """One run: a contender on so many workers, from one seed."""

    contender: Contender
    workers: int
    seed: int

    def __str__(self) -> str:
        return f"{self.contender.label}, {self.workers} worker{'s' * (self.workers > 1)}, seed {self.seed}"


@dataclass(frozen=True)
class Grid:
    """A comparison; `read_grid` reads it from a file. Until the learning rates are chosen, some contenders are not settled."""

    train: Mapping[str, Any]
    contenders: tuple[Contender, ...]
    workers: tuple[int, ...]
    seeds: tuple[int, ...]
    budget: tuple[str, float] | None
    target: float
    baseline: str
    margin: float
    limit: float
    tune_workers: int
    batch_per_worker: int

    def cells(self) -> list[Cell]:
        """The cells of settled contenders; all of one seed before those of the next, so that a part can be compared already."""
        found = [self.cell(contender, workers, seed) for seed, workers, contender
                 in product(self.seeds, self.workers, self.contenders) if contender.settled]
        return list(dict.fromkeys(found))

    def cell(self, contender: Contender, workers: int, seed: int) -> Cell:
        """The run of a contender beside others on so many workers."""
        return Cell(contender, contender.workers or workers, seed)

    def tuning(self, contender: Contender) -> dict[float, Cell]:
        """The runs that choose a learning rate, by rate."""
        named = {rate: contender._replace(label=f"{contender.label} (rate={rate:g})").at(rate) for rate in contender.rates}
        return {rate: self.cell(each, self.tune_workers, TUNING_SEED) for rate, each in named.items()}

    def with_rates(self, rates: Mapping[str, float]) -> Grid:
        """The same with the learning rate of some contenders, by label."""
        contenders = [each.at(rates[each.label]) if each.label in rates else each for each in self.contenders]
        return dataclasses.replace(self, contenders=tuple(contenders))

    def with_first_rates(self) -> Grid:
        """The same with a learning rate for all, to see what it would be."""
        return self.with_rates({each.label: each.rates[0] for each in self.contenders if not each.settled})

    def settings(self, cell: Cell, train_rows: int) -> dict[str, Any]:
        """The settings of `mpiddl.train` except for the place; ``train_rows`` are the rows of an epoch."""
        shared = {**self.train, **dict(cell.contender.own)}
        if self.batch_per_worker:
            shared["batch"] = self.batch_per_worker * cell.workers
        found = {**shared, "strategy": cell.contender.spec, "seed": cell.seed, "shards": self.shards(cell.workers),
                 **self._limits(shared, train_rows)}
        return {"threads": 1, **found}

    def shards(self, workers: int) -> int:
        """A multiple of the number of workers, large enough for ranks that only serve; the same for all strategies.

        Beside a reference, it is a multiple of all numbers of workers: the shards decide which rows are validation rows.
        """
        if asked := self.train.get("shards"):
            return int(asked)
        counts = [*self.workers, self.tune_workers, *(each.workers for each in self.contenders if each.workers)]
        together = lcm(*counts)
        if any(each.workers for each in self.contenders) and together <= MOST_WORKERS:
            most = max(count + ranks_beside(each.strategy, count) for count in counts for each in self.contenders)
            return -(-max(DEFAULT_SHARDS, most) // together) * together
        most = max(workers + ranks_beside(contender.strategy, workers) for contender in self.contenders)
        return -(-max(DEFAULT_SHARDS, most) // workers) * workers

    def _limits(self, shared: Mapping[str, Any], train_rows: int) -> dict[str, Any]:
        """The budget as settings of a training."""
        if self.budget is None:
            return {}
        kind, amount = self.budget
        if kind == "seconds":
            return {"max_seconds": amount}
        if kind == "bytes":
            return {"max_bytes": int(amount)}
        batch = int(shared.get("batch", FIELDS["batch"].default))
        whole, rest = divmod(amount, train_rows)  # an epoch's last batch may be a small one
        steps = int(whole) * ceil(train_rows / batch) + round(rest / batch)
        return {"epochs": ceil(amount / train_rows), "max_steps": max(1, steps)}

    def shared_job(self) -> Job:
        """The settings that all runs share, resolved."""
        return make_job({"threads": 1, **self.train})


def ranks_beside(strategy: Strategy, workers: int) -> int:
    """How many ranks a strategy needs in addition to the workers, because they only serve."""
    for more in range(65):
        ranks = range(workers + more)
        if sum(not strategy.placement(len(ranks), rank, len(ranks)).serves for rank in ranks) == workers:
            return more
    raise UsageError(f"strategy: got {describe(strategy)}, expected a strategy with {workers} ranks that compute "
                     "and at most 64 ranks that only serve")


def read_grid(path: Path, workers: Sequence[int] = ()) -> Grid:
    """The comparison in a TOML file; ``workers``, if given, replace those of the file.

    Raises
    ------
    UsageError
        The file cannot be read, or a value in it is wrong.
    """
    tables = read_toml(path)
    check_names(tables, ("train", "compare"), "table")
    for name in ("train", "compare"):
        if not isinstance(tables.get(name, {}), dict):
            raise UsageError(f"{name}: got {tables[name]!r}, expected a table with the heading [{name}]")
    if "compare" not in tables:
        raise UsageError(f"job file {path}: got no [compare] table, expected this table with strategies, workers and "
                         "seeds. mpiddl compare --help shows an example")  # fmt: skip
    return make_grid(tables.get("train", {}), tables["compare"], workers)


def make_grid(train: Mapping[str, Any], asked: Mapping[str, Any], workers: Sequence[int] = ()) -> Grid:
    """The comparison of the two tables of a file; see `read_grid`."""
    check_names(asked, KEYS, "key of [compare]")
    train = without_aliases(train)
    for name, instead in NOT_SHARED.items():
        if name in train:
            raise UsageError(f"{name}: got a value in [train], expected {instead} instead, because the comparison sets {name} "
                             "itself")
    job = make_job(train)
    contenders = _contenders(asked, train)
    counts = _counts("workers", list(workers) or asked.get("workers", 4))
    target = _number("target", asked.get("target", 0.0), 0.0, 1.0)
    if not job.validation:
        raise UsageError("validation: got 0 in [train], expected a share above 0, because compare chooses the strategy on "
                         "validation rows")  # fmt: skip
    baseline = asked.get("baseline", contenders[0].label)
    if baseline not in [contender.label for contender in contenders]:
        labels = ", ".join(contender.label for contender in contenders)
        raise UsageError(f"baseline: got {baseline!r}, expected one of {labels}")
    tune_workers = _count("tune_workers", asked.get("tune_workers", counts[0]))
    per_worker = _count("batch_per_worker", asked["batch_per_worker"]) if "batch_per_worker" in asked else 0
    if "batch" in train and per_worker:
        raise UsageError("batch_per_worker: got a value in [compare] and batch in [train], expected only one of them")
    most = max(*counts, tune_workers, *(each.workers for each in contenders))
    if most > MOST_WORKERS:
        raise UsageError(f"workers: got {most}, expected at most {MOST_WORKERS}")
    grid = Grid(train, contenders, counts, _seeds(asked.get("seeds", 3)), _budget(asked), target, baseline,
                _number("margin", asked.get("margin", 0.5), 0.0, 100.0), _number("limit", asked.get("limit", 3600.0), 1.0, 1e7),
                tune_workers, per_worker)
    if TUNING_SEED in grid.seeds and any(contender.rates for contender in contenders):
        raise UsageError(f"seeds: got {TUNING_SEED}, expected other seeds, because the learning rates are chosen with this one")
    if (count := len(contenders) * len(counts) * len(grid.seeds) + sum(len(each.rates) for each in contenders)) > MOST_CELLS:
        raise UsageError(f"grid: got {count} runs, expected at most {MOST_CELLS}")
    return grid


def _contenders(asked: Mapping[str, Any], train: Mapping[str, Any]) -> tuple[Contender, ...]:
    entries = asked.get("strategies")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"strategies: got {'none' if not entries else repr(entries)}, expected a list of one or more "
                         "strategies")
    if len(entries) > MOST_CONTENDERS:
        raise UsageError(f"strategies: got {len(entries)} strategies, expected at most {MOST_CONTENDERS}")
    found: dict[str, Contender] = {}
    for entry in entries:
        contender = _contender(entry, asked.get("rates", []))
        job = with_optimiser(make_job({**train, **dict(contender.own)}), contender.strategy)
        what = repr((contender.identity, job.as_dict(), contender.rates, contender.workers))
        if what in found:
            both = f"{found[what].label!r} and {contender.label!r}"
            raise UsageError(f"strategies: got {both}, which are the same strategy, expected each strategy only once")
        if contender.label in [other.label for other in found.values()]:
            raise UsageError(f"strategies: got two strategies with the label {contender.label!r}, expected different labels")
        found[what] = contender
    return tuple(found.values())


def _contender(entry: Any, rates: Any) -> Contender:
    """A strategy of the list; ``rates`` are those of ``[compare]``."""
    table = without_aliases(entry) if isinstance(entry, dict) else {}
    name = table.get("strategy", entry)
    if not isinstance(name, str):
        raise UsageError(f'strategies: got {entry!r}, expected a name or a table such as {{strategy = "asgd", rate = 0.02}}')
    check_names(table, ("strategy", "label", "rates", "workers", *OWN), "setting of a strategy")
    make_strategy(name)
    if "rate" in table and "rates" in table:
        raise UsageError(f"rates: got rate and rates for {name}, expected only one of them")
    own = tuple((key, value) for key, value in table.items() if key in OWN)
    shown = (*own, *(("workers", table[key]) for key in table if key == "workers"))
    told = ", ".join(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in shown)
    label = table.get("label", f"{name} ({told})" if told else name)
    if not isinstance(label, str) or not label.strip() or not label.isprintable():
        raise UsageError(f"label: got {label!r}, expected printable text")
    workers = _count("workers", table["workers"]) if "workers" in table else 0
    return Contender(label, name, own, () if "rate" in table else _rates(table.get("rates", rates)), workers)


def _rates(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise UsageError(f"rates: got {value!r}, expected a list of learning rates, such as [0.01, 0.02, 0.04]")
    found = tuple(_number("rates", each, 0.0, 1e6) for each in value)
    if len(set(found)) < len(found) or 0 in found:
        raise UsageError(f"rates: got {value!r}, expected numbers above 0, each only once")
    return found


def _counts(name: str, value: Any, least: int = 1) -> tuple[int, ...]:
    """Whole numbers, each once, from a number or a list of numbers."""
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(each, int) and not isinstance(each, bool) and each >= least for each in values):
        raise UsageError(f"{name}: got {value!r}, expected whole numbers of {least} or more, such as [4, 8]")
    if len(set(values)) < len(values):
        raise UsageError(f"{name}: got {value!r}, expected each value only once")
    return tuple(values)


def _count(name: str, value: Any) -> int:
    """One whole number."""
    if isinstance(value, list):
        raise UsageError(f"{name}: got {value!r}, expected one whole number")
    return _counts(name, value)[0]


def _seeds(value: Any) -> tuple[int, ...]:
    if isinstance(value, list):
        return _counts("seeds", value, 0)
    count = _count("seeds", value)
    if count > MOST_SEEDS:
        raise UsageError(f"seeds: got {count}, expected a number of seeds up to {MOST_SEEDS}, or a list of seeds")
    return tuple(range(1, count + 1))


def _budget(asked: Mapping[str, Any]) -> tuple[str, float] | None:
    given = [name for name in BUDGETS if name in asked]
    if len(given) > 1:
        raise UsageError(f"budget: got {' and '.join(given)}, expected only one of {', '.join(BUDGETS)}")
    return (given[0], _number(given[0], asked[given[0]], 1e-3 if given[0] == "seconds" else 1.0, 1e18)) if given else None


def _number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or not least <= value <= most:
        raise UsageError(f"{name}: got {value!r}, expected a number from {least:g} to {most:g}")
    return float(value)


def as_plain(grid: Grid) -> dict[str, Any]:
    """The comparison as plain values, to be kept and compared with another."""
    return {**dataclasses.asdict(grid), "contenders": [contender._asdict() for contender in grid.contenders]}
