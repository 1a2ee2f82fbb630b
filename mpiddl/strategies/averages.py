"""Averages of all ranks' parameters, applied at once or some steps after their start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.strategies.base import Replica, Step
from mpiddl.strategies.late import Late, late
from mpiddl.transport.base import IN_PLACE, Comm


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
            sum = self._late(comm, params).start(params)
            return {**state, "average": sum, "given": params.copy(), "at": step.index + 1}
        if self.due(step):
            average(comm, replica.params)
        return state

    def finish(self, comm: Comm, state: dict[str, Any], replica: Replica) -> None:
        """Apply the average in flight."""
        if "average" in state:
            self._apply(comm, state, replica)
        if self.delay:
            self._late(comm, replica.params).stop()

    def _apply(self, comm: Comm, state: dict[str, Any], replica: Replica) -> dict[str, Any]:
        mean = self._late(comm, replica.params).wait(state["average"])
        mean *= 1 / comm.size
        mean -= state["given"]
        replica.params += mean
        return {name: value for name, value in state.items() if name not in ("average", "given", "at")}

    def _late(self, comm: Comm, array: np.ndarray) -> Late:
        return late(comm, self, array.size, array.dtype, 1)


def average(comm: Comm, array: np.ndarray) -> None:
    """Replace ``array`` by its mean over all ranks."""
    if comm.size > 1:
        comm.Allreduce(IN_PLACE, array)
        array *= 1 / comm.size
