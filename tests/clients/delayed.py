"""Client (ii): the gradients of a step are applied ``delay`` steps later; their exchange runs behind the steps between.

Cost a step: one non-blocking all-reduce of V bytes; ``delay`` buffers of V bytes. With delay 0 it is synchronous SGD.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddl.strategies import Combined, Pending, Strategy
from mpiddl.transport.base import IN_PLACE


@dataclass(frozen=True)
class Delayed(Strategy):
    """State: the sums in flight, oldest first, each with the number of samples in it."""

    delay: int = 2

    def init(self, comm, replica):
        return []

    def combine(self, comm, state, grad, replica, step):
        total = grad.copy()  # the next step writes into grad while this sum is on its way
        flight = [*state, {"sum": Pending(total, comm.Iallreduce(IN_PLACE, total)), "count": step.total}]
        if len(flight) <= self.delay:
            return Combined(grad, 0, flight)
        oldest, *younger = flight
        return Combined(oldest["sum"].wait(), oldest["count"], younger)
