"""Client (i): each part of the gradient is reduced as soon as the backward pass has finished it.

Cost a step: one non-blocking all-reduce a layer, V bytes in all, hidden behind the rest of the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddl.strategies import Combined, Pending, Strategy
from mpiddl.transport.base import IN_PLACE


@dataclass(frozen=True)
class Bucketed(Strategy):
    """All-reduce by parts, started in `start`, waited for in `combine`. State: the parts in flight."""

    def init(self, comm, replica):
        return []

    def start(self, comm, state, grad, part, step):
        return [*state, Pending(grad[part], comm.Iallreduce(IN_PLACE, grad[part]))]

    def combine(self, comm, state, grad, replica, step):
        for part in state:
            part.wait()
        return Combined(grad, step.total, [])
