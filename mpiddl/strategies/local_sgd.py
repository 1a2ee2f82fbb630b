"""Local SGD: each rank steps on its own rows; every few steps all ranks take the average of their parameters.

Cost: one all-reduce of V bytes every ``period`` steps, so 1/period of synchronous SGD.
Source: Stich, ICLR 2019, arXiv:1805.09767, algorithm 1. Departures: momentum and other moments stay with their rank, and the
average weighs all ranks alike, as in the source, though the last batch of an epoch may be spread unevenly.
Law: period 1 with plain SGD is `allreduce`, to rounding, whenever the ranks' batches are of equal size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpiddl.errors import UsageError
from mpiddl.strategies.base import Replica, Step, Strategy
from mpiddl.transport.base import IN_PLACE, Comm


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Average the parameters every ``period`` steps, and at the end."""

    period: int = 8
    replicated = False

    def __post_init__(self) -> None:
        if self.period < 1:
            raise UsageError(f"period: got {self.period}, wanted a number of steps, 1 or more")

    def mix(self, comm: Comm, state: Any, replica: Replica, step: Step) -> Any:
        if (step.index + 1) % self.period == 0:
            _average(comm, replica)
        return state

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        _average(comm, replica)


def _average(comm: Comm, replica: Replica) -> None:
    if comm.size > 1:
        comm.Allreduce(IN_PLACE, replica.params)
        replica.params *= 1 / comm.size
