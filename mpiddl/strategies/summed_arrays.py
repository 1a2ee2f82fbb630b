"""Arrays that every rank has, summed over all ranks by a strategy.

Cost: the strategy's, for V bytes; one copy of V into the buffer that other ranks read, and one out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddl.strategies.base import Strategy
from mpiddl.strategies.flat_sum import FlatSum
from mpiddl.transport.comm import Comm


class SummedArrays:
    """The sum of real arrays (`FlatSum`). It is built with the first sum, and anew if shapes change."""

    def __init__(self, comm: Comm, strategy: Strategy):
        self._comm, self._strategy = comm, strategy
        self._shapes: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        self._sum: FlatSum | None = None

    def __call__(self, arrays: Sequence[np.ndarray], weight: float) -> list[np.ndarray]:
        """The sums over ranks of ``weight`` times the arrays, each in its dtype. Collective."""
        shapes = [(each.shape, each.dtype) for each in arrays]
        if self._sum is None or self._shapes != shapes:
            self._finish()
            kind: Any = np.dtype(np.float64 if any(each.dtype.itemsize == 8 for each in arrays) else np.float32)
            self._shapes, self._sum = shapes, FlatSum(self._comm, self._strategy, sum(each.size for each in arrays), kind)
        send, ends = self._sum.send, np.cumsum([each.size for each in arrays])
        parts = [slice(end - each.size, end) for end, each in zip(ends.tolist(), arrays, strict=True)]
        for part, each in zip(parts, arrays, strict=True):
            np.multiply(each.ravel(), send.dtype.type(weight), out=send[part], casting="unsafe")
        total = self._sum()
        return [total[part].astype(each.dtype).reshape(each.shape) for part, each in zip(parts, arrays, strict=True)]

    def _finish(self) -> None:
        if self._sum is not None:
            self._sum.finish()

    def Free(self) -> None:
        """Collective."""
        self._finish()
        self._comm.Free()
