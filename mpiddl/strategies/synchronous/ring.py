"""Synchronous SGD whose sums go round a ring of all ranks, node by node.

With ``overlap=1`` each layer's part is sent as soon as the backward pass has finished it. The step is that of
`allreduce`, to rounding (with overlap the parts are different, so the last bits differ from those without). With
``transport=verbs`` the gradient is computed in memory that the left neighbour writes to by itself, without a message or a copy
(`mpiddl.collectives.allreduce_ring_remote`).

Cost a step: 2 (P-1)/P V sent by each rank.
Source: see `mpiddl.collectives.allreduce_ring`; overlap as in Das et al. 2016, arXiv:1602.06709.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.collectives import allreduce, iallreduce
from mpiddl.collectives.allreduce_ring_remote import RemoteRing
from mpiddl.collectives.wire import MPI, VERBS, check_transport
from mpiddl.errors import UsageError
from mpiddl.node.topology import neighbours
from mpiddl.strategies.base import Combined, Replica, Step
from mpiddl.strategies.synchronous.gradient_sum import GradientSum
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm
from mpiddl.tuning.rule import RING_VERBS
from mpiddl.tuning.verbs import works


@dataclass(frozen=True)
class Ring(GradientSum):
    """Sum the gradients over all ranks in every step, round a ring; ``overlap=1``: during the backward pass.

    ``transport``: over mpi, or over RDMA verbs where they work."""

    sums_gradients = True

    overlap: int = 0
    transport: str = MPI

    def __post_init__(self) -> None:
        if self.overlap not in (0, 1):
            raise UsageError(f"ring: overlap: got {self.overlap}, expected 0 or 1")
        check_transport("ring: transport", self.transport)

    @property
    def _algorithm(self) -> str:
        return RING_VERBS if self.transport == VERBS else "ring"

    def reduction(self, comm: Comm, size: int, dtype: np.dtype) -> RemoteRing | None:
        if self.overlap or self.transport != VERBS or not works(neighbours(comm).ring):
            return None
        return RemoteRing(neighbours(comm).ring, size, dtype, kind=VERBS)

    def overlaps(self, comm: Comm, size: int, dtype: np.dtype) -> bool:
        return bool(self.overlap)

    def start(self, comm: Comm, state: Any, grad: np.ndarray, part: slice, step: Step) -> Any:
        if not self.overlap or comm.size == 1:
            return state
        moving = state.get("moving", [])
        for request in moving:
            request.Test()  # advances the requests in flight
        return {"moving": [*moving, iallreduce(comm, IN_PLACE, grad[part], algorithm=self._algorithm)]}

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        for request in state.get("moving", []):
            request.Wait()
        return super().combine(comm, {}, grad, replica, step)

    def reduce(self, comm: Comm, grad: np.ndarray) -> None:
        if not self.overlap:
            allreduce(comm, IN_PLACE, grad, algorithm=self._algorithm)
