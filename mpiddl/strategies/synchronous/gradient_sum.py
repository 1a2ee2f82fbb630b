"""What all strategies have in common that sum the gradients of all ranks in every step: they differ by their collective.

With the sum divided by the size of the global batch, P ranks take the step that one rank would take on the whole batch
(to rounding), however unevenly the batch is spread over them.

Source: Chen et al. 2016, "Revisiting distributed synchronous SGD", arXiv:1604.00981, without backup workers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.collectives import TreeSum, TwoStep
from mpiddl.collectives.allreduce_ring_remote import RemoteRing
from mpiddl.memory import PRIVATE
from mpiddl.strategies.base import Combined, Replica, Step, Strategy
from mpiddl.transport.comm import Comm

Reduction = TwoStep | TreeSum | RemoteRing


class GradientSum(Strategy):
    """Sum the gradients over all ranks in every step. Derived classes have a `reduction` or a `reduce`."""

    def reduction(self, comm: Comm, size: int, dtype: np.dtype) -> Reduction | None:
        """A reduction that is set up once, in whose ``input`` the gradient is computed; None if there is none. Collective."""
        return None

    def reduce(self, comm: Comm, grad: np.ndarray) -> None:
        """Sum ``grad`` in place, if there is no `reduction`."""

    def memory(self, comm: Comm, size: int, dtype: np.dtype) -> np.ndarray | None:
        kept = self._kept(comm, size, dtype)
        return kept.input if kept is not None else None

    def placed(self, comm: Comm, size: int, dtype: np.dtype) -> str:
        kept = self._kept(comm, size, dtype)
        return kept.placed if kept is not None else PRIVATE

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        kept = self._kept(comm, grad.size, grad.dtype)
        if kept is not None:
            if grad is not kept.input:  # made by a previous strategy of a chain
                kept.input[:] = grad
            grad = kept()
        elif comm.size > 1:
            self.reduce(comm, grad)
        return Combined(grad, step.total, state)

    def _kept(self, comm: Comm, size: int, dtype: np.dtype) -> Reduction | None:
        """Made once; it lives as long as ``comm``."""
        if comm.size == 1:
            return None
        found: Reduction | None = comm.kept((self, size, dtype), lambda: self.reduction(comm, size, dtype))
        return found
