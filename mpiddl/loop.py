"""The training loop. There is one; it knows no strategy by name, and in it only ``strategy.`` talks about the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpiddl.clock import now
from mpiddl.conditions import Pace
from mpiddl.memory import FlatBuffer
from mpiddl.models.base import Score, as_score
from mpiddl.optim import Optimiser, clip_norm
from mpiddl.strategies.base import Placement, Replica, Step, Strategy
from mpiddl.transport.base import Comm

Arrays = tuple[np.ndarray, np.ndarray]


@dataclass
class State:
    """What changes while a rank trains; everything a checkpoint has to hold.

    index : loops done by this rank.
    updates : optimiser updates its moments have seen.
    params : the model's parameters, flat and by name.
    moments : the optimiser's flat arrays.
    strategy : the strategy's state.
    apply, rate : a step of the optimiser on arrays of the strategy's own, and the learning rate (`Replica`).
    begun : steps of the run that a checkpoint has brought with it.
    """

    index: int
    updates: int
    params: FlatBuffer
    moments: dict[str, np.ndarray]
    strategy: Any
    apply: Callable[..., None]
    rate: Callable[[float], float]
    begun: int = 0

    @property
    def replica(self) -> Replica:
        tensors = list(self.params.slices.values())
        return Replica(self.params.flat, self.moments, self.apply, self.rate, self.begun, self.updates, tensors)


class Rows(Protocol):
    """The rows a rank draws from, step by step (`mpiddl.data.ShardedRows`)."""

    def batch(self, epoch: int, step: int) -> Arrays: ...

    def batch_by_shard(self, epoch: int, step: int) -> list[Arrays]: ...


@dataclass(frozen=True)
class Plan:
    """What stays the same on a rank: its part, its rows and the rules of the run.

    placement : which shards it trains on, or whom it serves.
    rows : draws the samples of a step.
    batch_rows : size of the global batch at a step of an epoch.
    steps_per_epoch : length of an epoch.
    steps : where the run stops.
    whole : steps of all its epochs, which ``steps`` may cut short.
    schedule : learning rate as a function of the steps done.
    clip : largest norm of the mean gradient, 0 for none.
    by_shard : the gradient is made of each shard's rows apart.
    meet : steps between two meetings of ranks that are not in lockstep, 0 for none.
    leaves : before which of its steps this rank leaves for good; None: it stays.
    """

    placement: Placement
    rows: Rows
    batch_rows: Callable[[int], int]
    steps_per_epoch: int
    steps: int
    whole: int
    schedule: Callable[[float], float]
    clip: float
    by_shard: bool = False
    meet: int = 0
    leaves: int | None = None

    def step(self, index: int) -> tuple[list[Arrays], Step]:
        """The rows, in as many parts as gradients are to be made, and the figures of a rank's loop number ``index``.

        A rank that serves has no rows.
        """
        if self.placement.serves:
            done = index / self.placement.serves
            return [], Step(index, 0, 0, self.schedule(done), self.steps, self.meet)
        epoch, within = divmod(index, self.steps_per_epoch)
        parts = self.rows.batch_by_shard(epoch, within) if self.by_shard else [self.rows.batch(epoch, within)]
        count = sum(len(x) for x, _ in parts)
        return parts, Step(index, count, self.batch_rows(within), self.schedule(index), self.steps, self.meet)

    def over(self, index: int) -> bool:
        """Whether this rank's own steps are done; a rank that has no end of its own is told by its strategy."""
        if self.leaves is not None and index >= self.leaves:
            return True
        return not (self.placement.serves or self.placement.endless) and index >= self.steps

    def done(self, state: State) -> int:
        """Steps of the run that this rank knows to be done: its own, or, where it has no end of its own, by the updates."""
        if self.placement.serves or self.placement.endless:
            return state.updates // max(self.placement.serves, 1)
        return state.index


def loop(comm: Comm, model: Any, optimiser: Optimiser, strategy: Strategy, plan: Plan, state: State,
         after: Callable[[State, Step, Score, bool], bool], pace: Pace | None = None) -> None:
    """Train until the plan is over, the strategy says stop, or ``after`` returns True.

    Parameters
    ----------
    comm : Comm
        The strategy's communicator; nothing else talks on it.
    model, optimiser, strategy
        See `mpiddl.models.base.Model`, `mpiddl.optim.Optimiser` and `mpiddl.strategies.base.Strategy`.
    plan : Plan
        This rank's part.
    state : State
        Where to begin; changed in place.
    after : callable
        Called after each step with the state, the step, its score, and whether all ranks meet; measures, saves, and says
        whether to end.
    pace : callable, optional
        Called when a rank has computed a gradient: `mpiddl.conditions`.

    Communication
    -------------
    The strategy's, and whatever ``after`` does.
    """
    gradient = Gradient(comm, model, state.params, strategy)
    while not plan.over(state.index):
        parts, step = plan.step(state.index)
        began = now()
        score = gradient(comm, state, parts, step)
        if pace is not None and step.total:
            pace(step.index, now() - began)
        combined = strategy.combine(comm, state.strategy, gradient.flat, state.replica, step)
        state.strategy = combined.state
        if combined.count:
            update(optimiser, state, combined.grad, 1 / combined.count, step.rate, plan.clip)
        state.updates += combined.updates
        if combined.stop:
            break
        state.strategy = strategy.mix(comm, state.strategy, state.replica, step)
        if combined.count or combined.updates or not plan.placement.serves:
            state.index += 1
        if after(state, step, score, combined.meet):
            break


def update(optimiser: Optimiser, state: State, grad: np.ndarray, scale: float, rate: float, clip: float) -> None:
    """One update with ``scale * grad``, whose norm is bounded by ``clip`` if that is above 0."""
    applying(optimiser, clip)(state.params.flat, grad, state.moments, rate, scale, state.updates)
    state.updates += 1


def applying(optimiser: Optimiser, clip: float) -> Callable[..., None]:
    """``apply(params, grad, moments, rate, scale, step)``: a step with ``scale * grad``, of norm ``clip`` at most if not 0."""

    def apply(params: np.ndarray, grad: np.ndarray, moments: dict[str, np.ndarray], rate: float, scale: float,
              step: int) -> None:
        if clip:
            scale, _ = clip_norm(grad, scale, clip)
        optimiser.update(params, grad, moments, rate, scale, step)

    return apply


class Gradient:
    """The gradient of a rank's rows into one flat buffer, each part handed to the strategy as soon as it is final.

    Of rows that come in several parts, shard by shard, it is the sum in a binary tree over them, each taken alone: then the
    tree of all shards has the same bits whoever holds which branch of it. The model is then asked in the same way for every
    shard, and the strategy is handed the whole at the end. Cost: a buffer for each level of the tree, an addition a part.
    """

    def __init__(self, comm: Comm, model: Any, params: FlatBuffer, strategy: Strategy):
        self.model, self.strategy = model, strategy
        self.buffer = FlatBuffer(model.shapes, params.dtype, strategy.memory(comm, params.flat.size, params.dtype))
        self.flat = self.buffer.flat
        self._sums = [self.buffer]
        self._takes = inspect.signature(model.gradient).parameters
        self._work: Any = None
        self._rows = -1

    def __call__(self, comm: Comm, state: State, parts: list[Arrays], step: Step) -> Score:
        if not step.total:  # a rank that serves has no gradient of its own
            return Score(0.0, 0)

        def ready(part: slice) -> None:
            state.strategy = self.strategy.start(comm, state.strategy, self.flat, part, step)

        if not self.strategy.by_shard:
            (rows,) = parts
            return self._of(state.params, rows, self.buffer, ready)
        score = self._tree(state.params, parts)
        ready(slice(0, self.flat.size))
        return score

    def _tree(self, params: FlatBuffer, parts: list[Arrays]) -> Score:
        """The sum over all parts: sums of equally many meet, like the carries of a binary counter; the rest, from the right."""
        scores, held = [], 0
        if not parts:
            self.flat[:] = 0
        for number, rows in enumerate(parts, 1):
            scores.append(self._of(params, rows, self._sum(held)))
            held += 1
            while number % 2 == 0:
                number, held = number // 2, held - 1
                self._sums[held - 1].flat += self._sums[held].flat
        for last in range(held - 1, 0, -1):
            self._sums[last - 1].flat += self._sums[last].flat
        found = [score.correct for score in scores if score.correct is not None]
        return Score(sum(score.loss for score in scores), sum(found) if len(found) == len(scores) else None)

    def _of(self, params: FlatBuffer, rows: Arrays, into: FlatBuffer, ready: Callable[[slice], None] | None = None) -> Score:
        """The gradient of some rows, and their score."""
        x, y = rows
        options: dict[str, Any] = {"ready": ready} if "ready" in self._takes else {}
        if "work" in self._takes:
            options["work"] = self._workspace(len(x)) if hasattr(self.model, "workspace") else None
        score = self.model.gradient(params.views, x, y, into.views, **options)
        if ready and "ready" not in options:
            ready(slice(0, self.flat.size))
        return as_score(score)

    def _sum(self, number: int) -> FlatBuffer:
        if number == len(self._sums):
            self._sums.append(FlatBuffer(self.model.shapes, self.flat.dtype))
        return self._sums[number]

    def _workspace(self, rows: int) -> Any:
        if rows > self._rows:
            self._work, self._rows = self.model.workspace(rows, self.flat.dtype), rows
        return self._work
