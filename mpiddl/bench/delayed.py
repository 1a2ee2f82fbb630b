"""How near to the bound steps come whose communication is late: the longer of computing and communicating.

Of one network, for each batch: a step that exchanges nothing, the all-reduce of its gradient with nothing computed, the step
that waits for it, and steps of strategies that do not, in turns. Each sample is a short training run by the loop and the
strategies that users get; its first steps, in which nothing is late yet, are not counted, and it ends with nothing on its
way. So at both ends of what is counted as many sums are on their way. All figures are medians of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpiddl.collectives import allreduce
from mpiddl.errors import UsageError
from mpiddl.machine.clock import now
from mpiddl.machine.launch_line import more_ranks
from mpiddl.memory import FlatBuffer, aligned_zeros
from mpiddl.models import MLP
from mpiddl.node.topology import neighbours
from mpiddl.optim import SGD
from mpiddl.strategies import Delayed, Placement, Strategy, make_strategy
from mpiddl.study.interleaved import quantiles
from mpiddl.study.output import Rows
from mpiddl.training.loop import Plan, State, applying, loop
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm
from mpiddl.transport.mpi import world

RATE, MOMENTUM = 1e-4, 0.9
COMPUTING, EXCHANGE, SYNCHRONOUS, BOUND = "computing alone", "communication alone", "synchronous", "bound"

WANTED = 0.9
"""Of the bound's steps per second."""

LEAST = 3
"""Samples of each, however long they take."""

Sample = Callable[[], float]


def run(env: Any, hidden: Sequence[int], batches: Sequence[int], strategies: Sequence[str], steps: int,
        seconds: float) -> list[dict[str, Any]]:
    """The rows, on rank 0; elsewhere none.

    Parameters
    ----------
    hidden : sequence of int
        Widths of the hidden layers between 784 inputs and 10 outputs.
    batches : sequence of int
        Rows a rank and step.
    strategies : sequence of str
        By name, such as "delayed:delay=2".
    steps : int
        Of a sample, beside those that are not counted.
    seconds : float
        How long is measured, for each batch.

    Raises
    ------
    UsageError
        On every rank: there is one rank only, a strategy whose ranks do not step together, or one that cannot run on these.

    Communication
    -------------
    Collective over ``COMM_WORLD``: what the strategies send.
    """
    found = {name: make_strategy(name) for name in strategies}
    for name, strategy in found.items():
        if not strategy.lockstep:
            raise UsageError(f"strategy: got {name!r}, expected a synchronous strategy, such as delayed:delay=1")
    with world(env) as link:
        if link.size == 1:
            raise UsageError(f"bench delayed: got 1 rank, expected 2 or more: {more_ranks(env, 'bench delayed')}")
        for strategy in found.values():
            strategy.check(link.size)
        rows = [row for batch in batches for row in _case(link, (784, *hidden, 10), batch, found, steps, seconds)]
        return [] if link.rank else rows


def _case(comm: Comm, sizes: tuple[int, ...], batch: int, strategies: dict[str, Strategy], steps: int,
          seconds: float) -> Iterator[dict[str, Any]]:
    """One batch, measured."""
    runs = {name: Run(comm, strategy, sizes, batch)
            for name, strategy in {COMPUTING: Strategy(), SYNCHRONOUS: Delayed(0), **strategies}.items()}
    flat = runs[COMPUTING].params.flat
    samples: dict[str, Sample] = {name: partial(run, steps) for name, run in runs.items()}
    samples[EXCHANGE] = _exchange(comm, flat)
    notes = {name: strategy.note(comm, flat.size, flat.dtype) for name, strategy in strategies.items()}
    times = _measure(comm, samples, seconds)
    medians = {name: quantiles(found)[1] for name, found in times.items()}
    bound = max(medians[COMPUTING], medians[EXCHANGE])
    where = {"network": "-".join(map(str, sizes)), "topology": str(neighbours(comm).topology)}
    for name in (COMPUTING, EXCHANGE, SYNCHRONOUS, *strategies, BOUND):
        low, median, high = quantiles(times.get(name, [bound]))
        yield {"case": f"batch {batch} a rank", **where, "contender": name, "baseline": SYNCHRONOUS, "seconds": median,
               "baseline_seconds": medians[SYNCHRONOUS], "ratio": medians[SYNCHRONOUS] / median, "p10": low, "p90": high,
               "batch_per_rank": batch, "steps_per_second": 1 / median, "of_bound": bound / median,
               "wanted": WANTED if name in strategies else None, "note": notes.get(name, "")}  # fmt: skip


class Run:
    """Training with a strategy on one rank's rows: always the same ones."""

    def __init__(self, comm: Comm, strategy: Strategy, sizes: tuple[int, ...], batch: int):
        rng = np.random.default_rng(comm.rank)
        self._rows = rng.random((batch, sizes[0]), dtype=np.float32), rng.integers(0, sizes[-1], batch)
        self._comm, self._strategy, self._model, self._optimiser = comm, strategy, MLP(sizes), SGD(momentum=MOMENTUM)
        self.params = FlatBuffer(self._model.shapes, "float32")
        self._model.init(self.params.views, np.random.default_rng(1))
        self._moments = self._optimiser.init(self.params.flat.size, "float32")
        never = 1 << 60
        self._plan = Plan(Placement((comm.rank,)), self, lambda within: batch * comm.size, never, never, never,
                          lambda steps: RATE, 0.0)

    def batch(self, epoch: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        return self._rows

    def batch_by_shard(self, epoch: int, step: int, parts: Any = None) -> list[tuple[np.ndarray, np.ndarray]]:
        return [self._rows]

    def __call__(self, steps: int) -> float:
        """Seconds of a step, the mean of so many; before them come those in which nothing is late yet. Collective."""
        comm, strategy = self._comm, self._strategy
        state = State(0, 0, self.params, self._moments, None, applying(self._optimiser, 0.0), self._plan.schedule)
        state.strategy = strategy.init(comm, state.replica)
        first, times = getattr(strategy, "delay", 0) + 1, list[float]()

        def after(*_: Any) -> bool:
            times.append(now())
            return len(times) == first + steps

        loop(comm, self._model, self._optimiser, strategy, self._plan, state, after)
        strategy.finish(comm, state.strategy, state.replica)
        return (times[-1] - times[first - 1]) / steps


def _exchange(comm: Comm, like: np.ndarray) -> Sample:
    """The all-reduce of a gradient, as the strategies do it."""
    grad = aligned_zeros(like.size, like.dtype)

    def exchange() -> float:
        began = now()
        allreduce(comm, IN_PLACE, grad)
        return now() - began

    return exchange


def _measure(comm: Comm, samples: dict[str, Sample], seconds: float) -> dict[str, list[float]]:
    """Samples of all, in turns, each the slowest rank's; what connections and caches cost in the first turn is left out."""
    times: dict[str, list[float]] = {name: [] for name in samples}
    for sample in samples.values():
        sample()
    until = now() + seconds
    while comm.bcast(now() < until) or len(times[COMPUTING]) < LEAST:
        for name, sample in samples.items():
            comm.Barrier()
            times[name].append(max(comm.allgather(sample())))
    return times


def sentences(rows: Rows) -> Iterator[str]:
    """Which strategies reached what is wanted of them, and for which batches not; what they have to say for themselves."""
    yield from dict.fromkeys(row["note"] for row in rows if row["note"])
    for name in dict.fromkeys(row["contender"] for row in rows if row["wanted"]):
        shares = {row["batch_per_rank"]: row["of_bound"] for row in rows if row["contender"] == name}
        below = ", ".join(f"{share:.0%} at {batch}" for batch, share in shares.items() if share < WANTED)
        yield (f"{name}: {min(shares.values()):.0%} of the bound or more, expected {WANTED:.0%}"
               + (f"; less: {below} rows a rank" if below else ""))


def draw(path: Path, title: str, rows: Rows) -> None:
    """Steps per second over the batch of a rank; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["contender"] for row in rows):
        points = [(row["batch_per_rank"], row["steps_per_second"]) for row in rows if row["contender"] == name]
        axes.loglog(*zip(*points, strict=True), "k--" if name == BOUND else "o-", ms=4, label=name)
    axes.set(xlabel="batch a rank", ylabel="steps per second", title=title)
    axes.legend()
    figure.savefig(path)
