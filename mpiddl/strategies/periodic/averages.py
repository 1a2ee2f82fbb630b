"""Averages of the parameters, applied at once or some steps after their start; weights of ranks with few rows or none.

Each sample has the same weight, to first order in the learning rate. A rank whose gradient is of c samples makes its update
with c T / b times the learning rate, where b is the number of samples of the global batch, and T the number of ranks that hold
rows (`own_rate`). These T ranks have the same weight in averages. Ranks without rows have the weight 0; they take the result.
This is our interpretation of sources that assume ranks with equal batches. With equal batches all factors are 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.strategies.base import Combined, Replica, Step
from mpiddl.strategies.periodic.sums_in_flight import Late, late
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm


@dataclass(frozen=True)
class Averages:
    """Every ``period`` steps an average is started. ``delay`` steps later it is applied.

    The state is a dict: ``average`` is the sum in flight, ``given`` this rank's part of it, ``at`` the step of its start.
    """

    period: int
    delay: int = 0

    def __post_init__(self) -> None:
        if self.period < 1:
            raise UsageError(f"period: got {self.period}, expected a number of steps, 1 or more")
        if not 0 <= self.delay < self.period:
            raise UsageError(f"delay: got {self.delay}, expected a number of steps from 0 to {self.period - 1}, less than "
                             "the period")

    def due(self, step: Step) -> bool:
        """Whether a period ends with this step."""
        return (step.index + 1) % self.period == 0

    def move_on(self, comm: Comm, array: np.ndarray) -> None:
        """Called between two parts of a gradient: advances averages if there is no progress thread."""
        if self.delay:
            self._late(comm, array).move_on()

    def mix(self, comm: Comm, state: dict[str, Any], replica: Replica, step: Step) -> dict[str, Any]:
        """Apply and start averages that are due. Returns the state."""
        if "average" in state and step.index + 1 >= state["at"] + self.delay:
            state = self._apply(comm, state, replica)
        if self.due(step) and self.delay:
            params = replica.params
            sum = self._late(comm, params).start(params if holds_rows(comm, replica) else np.zeros_like(params))
            return {**state, "average": sum, "given": params.copy(), "at": step.index + 1}
        if self.due(step):
            average(comm, replica.params, replica.trainers)
        return state

    def finish(self, comm: Comm, state: dict[str, Any], replica: Replica) -> None:
        """Apply the average in flight."""
        if "average" in state:
            self._apply(comm, state, replica)
        if self.delay:
            self._late(comm, replica.params).stop()

    def _apply(self, comm: Comm, state: dict[str, Any], replica: Replica) -> dict[str, Any]:
        mean = self._late(comm, replica.params).wait(state["average"])
        mean *= 1 / trainers(comm, replica)
        mean -= state["given"]
        replica.params += mean
        return {name: value for name, value in state.items() if name not in ("average", "given", "at")}

    def _late(self, comm: Comm, array: np.ndarray) -> Late:
        return late(comm, self, array.size, array.dtype, 1)


def average(comm: Comm, array: np.ndarray, trainers: int = 0) -> None:
    """Replace ``array`` by its mean over the first ``trainers`` ranks, 0: over all ranks. Called on all ranks."""
    if comm.size > 1:
        if trainers and comm.rank >= trainers:
            array[:] = 0
        comm.Allreduce(IN_PLACE, array)
        array *= 1 / (trainers or comm.size)


def trainers(comm: Comm, replica: Replica) -> int:
    """Number of ranks that hold rows."""
    return replica.trainers or comm.size


def holds_rows(comm: Comm, replica: Replica) -> bool:
    """Whether this rank holds rows."""
    return comm.rank < trainers(comm, replica)


def own_rate(step: Step, trainers: int, count: int, ranks: int = 1) -> float:
    """Factor for the learning rate of an update by ``ranks`` of ``trainers`` ranks, with the gradient of ``count`` samples.

    The last batch of an epoch may have fewer samples than ranks have rows. The factor of one sample is then 1, not larger:
    an update of one noisy gradient should not be longer than the others.

    Examples
    --------
    >>> own_rate(Step(0, 2, 6, 0.1), trainers=3, count=2)
    1.0
    >>> own_rate(Step(0, 1, 8, 0.1), trainers=16, count=1)
    2.0
    """
    return count * trainers / (ranks * max(step.total, min(step.full or step.total, trainers)))


def own_update(grad: np.ndarray, state: Any, step: Step, trainers: int) -> Combined:
    """The rank's own gradient for its update, at the learning rate of `own_rate`."""
    return Combined(grad, step.count, state, rate=own_rate(step, trainers, step.count) if step.count else 1.0)
