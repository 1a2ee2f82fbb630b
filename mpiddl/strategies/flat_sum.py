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
    overlaps : bool
        The sum of a part can start before the others are final (`ready`).
    send : numpy.ndarray
        This rank's summand, to be written before each call: (elements,), kind; in shared memory where the strategy uses it.
    """

    def __init__(self, comm: Comm, strategy: Strategy, elements: int, kind: Any):
        self._comm, self._strategy, self._index = comm, strategy, 0
        memory = strategy.memory(comm, elements, kind)
        self.send = aligned_zeros(elements, kind) if memory is None else memory
        self._replica = Replica(self.send, {})
        self._state: Any = strategy.init(comm, self._replica)
        self.overlaps = strategy.overlaps(comm, elements, self.send.dtype)
        self._open = elements

    def ready(self, start: int) -> None:
        """``send[start:]`` is final: the sum of what is new may begin. ``start`` falls, by the same steps on every rank."""
        if self.overlaps and start < self._open:
            part, self._open = slice(start, self._open), start
            self._state = self._strategy.start(self._comm, self._state, self.send, part, self._step)

    @property
    def _step(self) -> Step:
        return Step(self._index, 1, 1, 0.0)

    def __call__(self) -> np.ndarray:
        """The sum, in memory that the next call writes over. Collective; the strategy's cost."""
        self.ready(0)
        self._open = self.send.size
        combined = self._strategy.combine(self._comm, self._state, self.send, self._replica, self._step)
        self._state, self._index = combined.state, self._index + 1
        return combined.grad

    def finish(self) -> None:
        """There is no further sum. Collective."""
        self._strategy.finish(self._comm, self._state, self._replica)
