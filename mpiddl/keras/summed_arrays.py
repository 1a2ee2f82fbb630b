"""Arrays that every rank has, summed over all ranks by a strategy.

Cost: the strategy's, for V bytes; one copy of V into the buffer that other ranks read, and one out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddl.memory import aligned_zeros
from mpiddl.strategies.base import Replica, Step, Strategy
from mpiddl.transport.comm import Comm


class SummedArrays:
    """The sum of real arrays. What it needs is built with the first sum, and anew if shapes change.

    Parameters
    ----------
    comm : Comm
        Used for this alone; freed with `Free`.
    strategy : Strategy
        One that sums gradients in every step.
    """

    def __init__(self, comm: Comm, strategy: Strategy):
        self._comm, self._strategy, self._index = comm, strategy, 0
        self._shapes: list[tuple[int, ...]] | None = None
        self._send, self._state, self._replica = np.empty(0, np.float32), None, Replica(np.empty(0, np.float32), {})

    def __call__(self, arrays: Sequence[np.ndarray], weight: float) -> list[np.ndarray]:
        """The sums over ranks of ``weight`` times the arrays, each in its dtype. Collective."""
        if self._shapes != [each.shape for each in arrays]:
            self._build(arrays)
        end = 0
        for each in arrays:
            begin, end = end, end + each.size
            np.multiply(each.ravel(), self._send.dtype.type(weight), out=self._send[begin:end], casting="unsafe")
        combined = self._strategy.combine(self._comm, self._state, self._send, self._replica, Step(self._index, 1, 1, 0.0))
        self._state, self._index, end, found = combined.state, self._index + 1, 0, []
        for each in arrays:
            begin, end = end, end + each.size
            found.append(combined.grad[begin:end].astype(each.dtype).reshape(each.shape))
        return found

    def _build(self, arrays: Sequence[np.ndarray]) -> None:
        if self._shapes is not None:
            self._strategy.finish(self._comm, self._state, self._replica)
        self._shapes = [each.shape for each in arrays]
        kind: Any = np.dtype(np.float64 if any(each.dtype.itemsize == 8 for each in arrays) else np.float32)
        elements = sum(each.size for each in arrays)
        memory = self._strategy.memory(self._comm, elements, kind)
        self._send = aligned_zeros(elements, kind) if memory is None else memory
        self._replica = Replica(self._send, {})
        self._state = self._strategy.init(self._comm, self._replica)

    def Free(self) -> None:
        """Collective."""
        if self._shapes is not None:
            self._strategy.finish(self._comm, self._state, self._replica)
        self._comm.Free()
