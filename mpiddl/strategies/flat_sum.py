"""A flat array that a strategy sums over all ranks, in every call once."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.memory import aligned_zeros
from mpiddl.strategies.base import Replica, Step, Strategy
from mpiddl.transport.comm import Comm


class FlatSum:
    """The sum of ``send`` over all ranks. Construction is collective.

    Parameters
    ----------
    comm : Comm
        Used for this alone; the caller frees it.
    strategy : Strategy
        One that sums gradients in every step.
    elements : int
    kind : numpy dtype
        float32 or float64.

    Attributes
    ----------
    send : numpy.ndarray
        This rank's summand, to be written before each call: (elements,), kind; in shared memory where the strategy uses it.
    """

    def __init__(self, comm: Comm, strategy: Strategy, elements: int, kind: Any):
        self._comm, self._strategy, self._index = comm, strategy, 0
        memory = strategy.memory(comm, elements, kind)
        self.send = aligned_zeros(elements, kind) if memory is None else memory
        self._replica = Replica(self.send, {})
        self._state: Any = strategy.init(comm, self._replica)

    def __call__(self) -> np.ndarray:
        """The sum, in memory that the next call writes over. Collective; the strategy's cost."""
        combined = self._strategy.combine(self._comm, self._state, self.send, self._replica, Step(self._index, 1, 1, 0.0))
        self._state, self._index = combined.state, self._index + 1
        return combined.grad

    def finish(self) -> None:
        """There is no further sum. Collective."""
        self._strategy.finish(self._comm, self._state, self._replica)
