"""One run of ``mpiddl bench staleness``: a rule with so many workers at such speeds, trained in simulated time.

A step of a worker takes one simulated second, times up to 1.2 at random, times what the pattern says. Rates are told as
the step in the long run: with momentum mu the optimiser's rate is 1 - mu times that.
"""

from __future__ import annotations

import importlib.metadata
import time
import warnings
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiddl.data import ArraySource, Data, Source, open_data
from mpiddl.data.hold_out import hold_out
from mpiddl.errors import ConvergenceError, UsageError
from mpiddl.machine import threads
from mpiddl.machine.clock import now
from mpiddl.strategies import describe, make_strategy
from mpiddl.strategies.by_name import registered
from mpiddl.strategies.server.rule import ONE_SIDED, Rule
from mpiddl.training.run import train
from mpiddl.transport import virtual
from mpiddl.version import __version__

SEQUENTIAL = "sequential"
"""The reference: one worker without a server, Nesterov's momentum."""

PATTERNS = "equal", "spread", "straggler"
"""Speeds: all alike; 1 to 4 times as slow, evenly spread; one worker 8 times as slow."""

SPREAD, STRAGGLER, JITTER = 4.0, 8.0, 0.1
MOMENTUM = 0.9
VALIDATION = 0.1
SHARDS = 64
"""At least; what a multiple of 2, 4, ..., 32 workers holds evenly."""

OUTCOME = "diverged", "validation_accuracy", "test_accuracy", "delay", "seconds", "cpu_seconds"
"""What is kept of a run."""

ONE_THREAD = threads.Threads(1, 1, "a process")


@dataclass(frozen=True)
class Run:
    """What one run is.

    rule : of the strategies, with its parameters, or `SEQUENTIAL`.
    rate : the step in the long run.
    workers, pattern : how many, and of which speeds.
    seed : of the weights, the order of the samples, the times of the steps.
    tuning : whether it is there to choose a rate: then it has no test rows.
    epochs, batch, hidden : samples in all, a worker's a step, widths.
    """

    rule: str
    rate: float
    workers: int
    pattern: str
    seed: int
    tuning: bool
    epochs: int
    batch: int
    hidden: tuple[int, ...]

    def __str__(self) -> str:
        where = "" if self.rule == SEQUENTIAL else f", {self.workers} workers, {self.pattern}"
        return f"{self.rule}, rate {self.rate:g}{where}, " + ("tuning" if self.tuning else f"seed {self.seed}")

    def job(self) -> dict[str, Any]:
        """The settings of `mpiddl.train`."""
        common = {
            "model": "mlp", "hidden": self.hidden, "epochs": self.epochs, "batch": self.batch * self.workers,
            "seed": self.seed, "schedule": "cosine", "validation": 0.0, "threads": 1,
        }  # fmt: skip
        if self.rule == SEQUENTIAL:
            return {**common, **self._update("nesterov"), "strategy": "alone", "shards": SHARDS}
        rule = read_rule(self.rule)
        size = self.workers + rule.serving
        shards = -(-max(SHARDS, size) // self.workers) * self.workers
        return {**common, **self._update(optimiser(rule)), "strategy": self.rule, "shards": shards, "simulate": size,
                "slow": slow(self.pattern, self.workers), "jitter": JITTER}

    def _update(self, name: str) -> dict[str, Any]:
        rate = self.rate * (1 if name == "sgd" else 1 - MOMENTUM)
        return {"optimiser": name, "momentum": MOMENTUM, "rate": float(f"{rate:.12g}")}  # 0 would be a default of train's


def slow(pattern: str, workers: int) -> str:
    """The setting ``slow`` of a training.

    Examples
    --------
    >>> slow("equal", 4), slow("spread", 4), slow("straggler", 4)
    ('', '0:1,1:2,2:3,3:4', '3:8')
    """
    factors = {
        "equal": {},
        "spread": {worker: 1 + (SPREAD - 1) * worker / (workers - 1) for worker in range(workers)},
        "straggler": {workers - 1: STRAGGLER},
    }[pattern]
    return ",".join(f"{worker}:{factor:g}" for worker, factor in factors.items())


def read_rule(text: str) -> Rule:
    """The strategy that a rule names.

    Raises
    ------
    UsageError
        It is none, or none that workers meet at their own pace over messages.
    """
    rule = registered(make_strategy(text))
    if not isinstance(rule, Rule):
        raise UsageError(f"rules: got {text!r}, expected parameter servers such as asgd or ddc-asgd")
    if rule.communication == ONE_SIDED:
        raise UsageError(f"rules: got {text!r}, expected communication=two-sided, because time is simulated")
    if rule.servers > SHARDS:
        raise UsageError(f"rules: got {text!r}, expected at most {SHARDS} servers")
    return rule


def optimiser(rule: Rule) -> str:
    """Whose steps a rule takes: what it asks for; else, as published, plain SGD."""
    return rule.optimisers[0] if rule.optimisers else "sgd"


class Parts(NamedTuple):
    """A data set cut in three: training rows without test rows, the same with them, and rows to choose rates by."""

    tuning: Data
    tested: Data
    x: np.ndarray
    y: np.ndarray
    checksum: int


def cut(data: Data) -> Parts:
    """Hold a tenth of the training rows back, always the same ones.

    Raises
    ------
    UsageError
        If there are no classes or no test rows.
    """
    if not data.classes or data.test is None:
        raise UsageError(f"data: got {data.name} without {'test rows' if data.classes else 'classes'}, expected classes and "
                         "test rows")
    kept, held = hold_out(data.train, VALIDATION)
    if held is None:
        raise UsageError(f"data: got {data.name} with 1 training row, expected 2 or more")
    source, test = _in_memory(kept, data.classes), _in_memory(data.test, data.classes)
    tuning, tested = (Data(data.name, source, rows, data.classes, data.features) for rows in (None, test))
    ((x, y),) = source.read([range(kept.n)])
    ((x_held, y_held),) = held.read([range(held.n)])
    return Parts(tuning, tested, x_held, y_held, zlib.crc32(y.data, zlib.crc32(x.data)))


def _in_memory(source: Source, classes: int) -> ArraySource:
    """Files are read once, not by every worker."""
    ((x, y),) = source.read([range(source.n)])
    return ArraySource(x, y, classes=classes, task="classification")


class Runner:
    """Does runs on one data set, which it reads when the first one comes.

    Parameters
    ----------
    data : str
        Its name.
    search : sequence of Path
        Folders to look in.
    """

    def __init__(self, data: str, search: Sequence[Path]):
        self.data, self.search = data, search

    def __reduce__(self) -> Any:  # another process reads its own rows
        return Runner, (self.data, self.search)

    @cached_property
    def parts(self) -> Parts:
        """The data set, cut."""
        return cut(open_data(self.data, self.search))

    @cached_property
    def _versions(self) -> dict[str, str]:
        return {"mpiddl": __version__, **{name: importlib.metadata.version(name) for name in ("numpy", "numba")}}

    def settings(self, run: Run) -> dict[str, Any]:
        """Everything that a run's outcome depends on."""
        strategy = describe(make_strategy(run.job()["strategy"]))  # with the parameters that are not given
        return {**run.job(), "strategy": strategy, "tuning": run.tuning, "data": self.data, "rows": self.parts.tested.train.n,
                "checksum": self.parts.checksum, "versions": self._versions}

    def __call__(self, run: Run) -> dict[str, Any]:
        """Train, and measure on the rows held back and, unless for tuning, on the test rows.

        A run that diverges counts as a guess.
        """
        began, busy = now(), time.process_time()
        outcome = self._outcome(run, self.parts.tuning if run.tuning else self.parts.tested)
        return {**outcome, "seconds": round(now() - began, 2), "cpu_seconds": round(time.process_time() - busy, 2)}

    def warm(self, runs: Iterable[Run]) -> None:
        """Compile what these take, with a few steps of each: processes that start together would all do it."""
        ((x, y),) = self.parts.tested.train.read([range(SHARDS)])
        few = Data(self.data, ArraySource(x, y, classes=self.parts.tested.classes), None, self.parts.tested.classes,
                   self.parts.tested.features)
        for run in runs:
            self._outcome(replace(run, workers=min(run.workers, 2), pattern="equal", epochs=1, batch=16), few)

    def _outcome(self, run: Run, data: Data) -> dict[str, Any]:
        guess = 1 / data.outputs
        diverged = {"diverged": True, "validation_accuracy": guess, "test_accuracy": guess if data.test else None, "delay": 0}
        try:
            with threads.apply(ONE_THREAD), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of numbers that grow too large
                (result,) = virtual.run(1, lambda comm: train(data=data, comm=comm, quiet=True, **run.job()))
                found = result.predict(self.parts.x)
        except ConvergenceError:
            return diverged
        if not np.isfinite(found).all():
            return diverged
        return {
            "diverged": False,
            "validation_accuracy": float(np.mean(found.argmax(axis=1) == self.parts.y)),
            "test_accuracy": result.summary["test_accuracy"],
            "delay": result.summary["staleness"]["median"] if run.rule != SEQUENTIAL else 0,
        }
