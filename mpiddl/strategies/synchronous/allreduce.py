"""Synchronous SGD: the gradients of a step are summed over all ranks by the MPI library's own Allreduce.

With the sum divided by the size of the global batch, P ranks take the step that one rank would take on the whole batch
(to rounding), however unevenly the batch is spread over them.

Cost a step: one all-reduce of V bytes, 2 (P-1)/P V sent by each rank at best.
Source: Chen et al. 2016, "Revisiting distributed synchronous SGD", arXiv:1604.00981, without backup workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.strategies.base import Combined, Replica, Step, Strategy
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Sum the gradients over all ranks in every step."""

    sums_gradients = True

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        if comm.size > 1:
            comm.Allreduce(IN_PLACE, grad)
        return Combined(grad, step.total, state)
