"""The training loop, the same for all strategies. Inside it only the strategy communicates about the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.machine.clock import now
from mpiddl.memory import FlatBuffer
from mpiddl.models.base import Score, as_score
from mpiddl.optim import Optimiser, clip_norm
from mpiddl.strategies.base import Combined, Placement, Replica, Step, Strategy
from mpiddl.training.conditions import Pace
from mpiddl.transport.comm import Comm

Arrays = tuple[np.ndarray, np.ndarray]


@dataclass
class State:
    """The changing state of a training rank; a checkpoint saves all of it.

    index : number of finished loops of this rank.
    updates : number of updates of the run, on a serving rank those that it has made.
    params : parameters of the model, flat and by name.
    moments : flat arrays of the optimiser.
    strategy : state of the strategy.
    apply, rate : one update of the optimiser on given arrays, and the learning rate (see `Replica`).
    begun : number of steps that a resumed run had done before.
    trainers : number of ranks that hold rows (see `Replica`).
    earlier : updates that the moments have seen beyond ``updates``, by another strategy on a server.
    """

    index: int
    updates: int
    params: FlatBuffer
    moments: dict[str, np.ndarray]
    strategy: Any
    apply: Callable[..., None]
    rate: Callable[[float], float]
    begun: int = 0
    trainers: int = 0
    earlier: int = 0

    @property
    def seen(self) -> int:
        """Number of updates that the optimiser's moments have seen."""
        return self.updates + self.earlier

    @property
    def replica(self) -> Replica:
        tensors = list(self.params.slices.values())
        return Replica(self.params.flat, self.moments, self.apply, self.rate, self.begun, self.seen, tensors,
                       self.params.layers, self.trainers)


class Rows(Protocol):
    """The source of a rank's batches (`mpiddl.data.ShardedRows`)."""

    def batch(self, epoch: int, step: int) -> Arrays: ...

    def batch_by_shard(self, epoch: int, step: int, parts: Sequence[Sequence[int]] | None = None) -> list[Arrays]: ...


@dataclass(frozen=True)
class Plan:
    """The constant part of a run on one rank.

    placement : data shards that the rank trains on, or the number of workers it serves.
    rows : source of the samples of a step.
    batch_rows : size of the global batch as a function of the step within an epoch.
    steps_per_epoch : number of steps in an epoch.
    steps : number of steps after which the run stops.
    whole : number of steps of all epochs; ``steps`` may be smaller.
    schedule : learning rate as a function of the number of finished steps.
    clip : largest norm of the mean gradient; 0: no limit.
    by_shard : compute one gradient for each data shard.
    blocks : compute one gradient for each of these sets of data shards.
    meet : steps between two meetings of ranks that are not in lockstep; 0: no meetings.
    leaves : step at which this rank drops out permanently, or None.
    filled : the steps of an epoch that an ``endless`` rank takes; None: all.
    trainers : number of ranks that hold rows (see `Replica`).
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
    blocks: Sequence[Sequence[int]] | None = None
    meet: int = 0
    leaves: int | None = None
    filled: Sequence[int] | None = None
    trainers: int = 0

    def step(self, index: int) -> tuple[list[Arrays], Step]:
        """The batches and the `Step` of a rank's loop number ``index``: one batch, or one for each data shard with
        ``by_shard``, or for each of ``blocks``.

        A serving rank has no batches.
        """
        if self.placement.serves:
            done = index / self.placement.serves
            return [], Step(index, 0, 0, self.schedule(done), self.steps, self.meet)
        epoch, within = divmod(index, len(self.filled or range(self.steps_per_epoch)))
        within = self.filled[within] if self.filled else within
        several = self.by_shard or self.blocks is not None
        parts = self.rows.batch_by_shard(epoch, within, self.blocks) if several else [self.rows.batch(epoch, within)]
        count = sum(len(x) for x, _ in parts)
        total, rate = self.batch_rows(within), self.schedule(index)
        return parts, Step(index, count, total, rate, self.steps, self.meet, self.batch_rows(0))

    def over(self, index: int) -> bool:
        """Whether this rank has finished its steps. Serving and ``endless`` ranks are stopped by their strategy instead."""
        if self.leaves is not None and index >= self.leaves:
            return True
        return not (self.placement.serves or self.placement.endless) and index >= self.steps

    def done(self, state: State) -> int:
        """Finished steps of the run: this rank's own, or, for serving and ``endless`` ranks, computed from the updates."""
        if self.placement.serves or self.placement.endless:
            return state.updates // max(self.placement.serves, 1)
        return state.index


def loop(comm: Comm, model: Any, optimiser: Optimiser, strategy: Strategy, plan: Plan, state: State,
         after: Callable[[State, Step, Score, bool], bool], pace: Pace | None = None) -> None:
    """Train until the plan is finished, the strategy stops, or ``after`` returns True.

    Parameters
    ----------
    comm : Comm
        The strategy's communicator; nothing else uses it.
    model, optimiser, strategy
        See `mpiddl.models.base.Model`, `mpiddl.optim.Optimiser` and `mpiddl.strategies.base.Strategy`.
    plan : Plan
        This rank's part.
    state : State
        Initial state; changed in place.
    after : callable
        Called after each step with the state, the step, its score, and whether all ranks meet. It measures, saves checkpoints,
        and returns whether to stop.
    pace : callable, optional
        Called after the computation of a gradient, or of each block (`mpiddl.training.conditions`).

    Communication
    -------------
    That of the strategy and of ``after``.
    """
    gradient = Gradient(comm, model, state.params, strategy, plan.blocks is not None, pace)
    while not plan.over(state.index):
        parts, step = plan.step(state.index)
        if strategy.needs_gradient(comm, state.strategy, state.replica, step):
            score, count = gradient(comm, state, parts, step)
        else:
            score, count = Score(0.0, 0), 0
        if count != step.count:
            step = replace(step, count=count)
        combined = strategy.combine(comm, state.strategy, gradient.flat, state.replica, step)
        if not isinstance(combined, Combined):
            raise UsageError(f"strategy.combine: returned {type(combined).__name__}, expected Combined(grad, count, state)")
        state.strategy = combined.state
        if combined.count:
            update(optimiser, state, combined.grad, 1 / combined.count, step.rate * combined.rate, plan.clip)
        state.updates += combined.updates
        if combined.stop:
            break
        state.strategy = strategy.mix(comm, state.strategy, state.replica, step)
        if combined.count or combined.updates or not plan.placement.serves:
            state.index += 1
        if after(state, step, score, combined.meet):
            break


def update(optimiser: Optimiser, state: State, grad: np.ndarray, scale: float, rate: float, clip: float) -> None:
    """Make one update with ``scale * grad``. ``clip`` limits its norm if it is above 0."""
    applying(optimiser, clip)(state.params.flat, grad, state.moments, rate, scale, state.seen)
    state.updates += 1


def applying(optimiser: Optimiser, clip: float) -> Callable[..., None]:
    """Return ``apply(params, grad, moments, rate, scale, step)``: an update with ``scale * grad``, clipped to norm ``clip``."""

    def apply(params: np.ndarray, grad: np.ndarray, moments: dict[str, np.ndarray], rate: float, scale: float,
              step: int) -> None:
        if clip:
            scale, _ = clip_norm(grad, scale, clip)
        optimiser.update(params, grad, moments, rate, scale, step)

    return apply


class Gradient:
    """The gradient of a rank's rows, in one flat buffer. Each part goes to the strategy as soon as it is final.

    With one batch per data shard, the gradients of the shards are summed in a binary tree. The tree over all shards then gives
    the same bits for any distribution of its branches over ranks. The strategy receives the whole gradient at the end. Cost: a
    buffer for each level of the tree, and one addition per shard.
    """

    def __init__(self, comm: Comm, model: Any, params: FlatBuffer, strategy: Strategy, blocks: bool = False,
                 pace: Pace | None = None):
        self.model, self.strategy, self._blocks, self._pace = model, strategy, blocks, pace
        self.buffer = FlatBuffer(model.shapes, params.dtype, strategy.memory(comm, params.flat.size, params.dtype))
        self.flat = self.buffer.flat
        self._sums = [self.buffer]
        self._takes = inspect.signature(model.gradient).parameters
        self._work: Any = None
        self._rows = -1

    def __call__(self, comm: Comm, state: State, parts: list[Arrays], step: Step) -> tuple[Score, int]:
        """Compute it. Returns the score, and the number of the rows."""
        if not step.total:  # a serving rank computes no gradient
            return Score(0.0, 0), step.count

        def ready(part: slice) -> None:
            state.strategy = self.strategy.start(comm, state.strategy, self.flat, part, step)

        if self._blocks:
            return self._by_block(comm, state, parts, step)
        began = now()
        if self.strategy.by_shard:
            score = self._tree(state.params, parts)
            ready(slice(0, self.flat.size))
        else:
            (rows,) = parts
            score = self.compute(state.params, rows, self.buffer.views, ready)
        self._paced(step, began)
        return score, step.count

    def _by_block(self, comm: Comm, state: State, parts: list[Arrays], step: Step) -> tuple[Score, int]:
        scores: list[Score] = []
        count = 0
        for number, rows in enumerate(parts):
            if number and not self.strategy.needs_gradient(comm, state.strategy, state.replica, step):
                break
            began = now()
            scores.append(self.compute(state.params, rows, self.buffer.views))
            count += len(rows[0])
            self._paced(step, began, number, len(parts))
            state.strategy = self.strategy.combine_block(comm, state.strategy, self.flat, number, step)
        return _added(scores), count

    def _paced(self, step: Step, began: float, number: int = 0, parts: int = 1) -> None:
        """Take as long as the user wants, after the computation of a part."""
        if self._pace is not None:
            self._pace(step.index, now() - began, number, parts)

    def _tree(self, params: FlatBuffer, parts: list[Arrays]) -> Score:
        """Sum over all parts: sums of equal size are added, like carries in a binary counter; then the rest, from the right."""
        scores, held = [], 0
        if not parts:
            self.flat[:] = 0
        for number, rows in enumerate(parts, 1):
            scores.append(self.compute(params, rows, self._sum(held).views))
            held += 1
            while number % 2 == 0:
                number, held = number // 2, held - 1
                self._sums[held - 1].flat += self._sums[held].flat
        for last in range(held - 1, 0, -1):
            self._sums[last - 1].flat += self._sums[last].flat
        return _added(scores)

    def compute(self, params: FlatBuffer, rows: Arrays, into: dict[str, np.ndarray],
                ready: Callable[[slice], None] | None = None) -> Score:
        """Compute the gradient of ``rows`` in the views ``into``. Returns their score."""
        x, y = rows
        options: dict[str, Any] = {"ready": ready} if "ready" in self._takes else {}
        if "work" in self._takes:
            options["work"] = self._workspace(len(x)) if hasattr(self.model, "workspace") else None
        score = self.model.gradient(params.views, x, y, into, **options)
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


def _added(scores: Sequence[Score]) -> Score:
    """Of several batches."""
    found = [score.correct for score in scores if score.correct is not None]
    return Score(sum(score.loss for score in scores), sum(found) if len(found) == len(scores) else None)
