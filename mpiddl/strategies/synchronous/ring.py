"""Synchronous SGD whose sums go round a ring of all ranks, node by node.

With ``overlap=1`` each layer's part is sent as soon as the backward pass has finished it. The step is that of
`allreduce`, to rounding (with overlap the parts are different, so the last bits differ from those without).

Cost a step: 2 (P-1)/P V sent by each rank.
Source: see `mpiddl.collectives.allreduce_ring`; overlap as in Das et al. 2016, arXiv:1602.06709.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.collectives import allreduce, iallreduce
from mpiddl.errors import UsageError
from mpiddl.strategies.base import Combined, Replica, Step
from mpiddl.strategies.synchronous.gradient_sum import GradientSum
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm


@dataclass(frozen=True)
class Ring(GradientSum):
    """Sum the gradients over all ranks in every step, round a ring; ``overlap=1``: during the backward pass."""

    sums_gradients = True

    overlap: int = 0

    def __post_init__(self) -> None:
        if self.overlap not in (0, 1):
            raise UsageError(f"ring: overlap: got {self.overlap}, expected 0 or 1")

    def start(self, comm: Comm, state: Any, grad: np.ndarray, part: slice, step: Step) -> Any:
        if not self.overlap or comm.size == 1:
            return state
        moving = state.get("moving", [])
        for request in moving:
            request.Test()  # advances the requests in flight
        return {"moving": [*moving, iallreduce(comm, IN_PLACE, grad[part], algorithm="ring")]}

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        for request in state.get("moving", []):
            request.Wait()
        return super().combine(comm, {}, grad, replica, step)

    def reduce(self, comm: Comm, grad: np.ndarray) -> None:
        if not self.overlap:
            allreduce(comm, IN_PLACE, grad, algorithm="ring")
