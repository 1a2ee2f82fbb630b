"""The memory of a step of an `MLP`, and the threads that share its products."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from numpy.typing import DTypeLike

from mpiddl import kernels
from mpiddl.errors import ShapeError
from mpiddl.memory import aligned_zeros, float_dtype

UNIT = 64
"""Parts of a product begin at multiples of this many rows or columns: whole cache lines and whole tiles."""

WORTH_SHARING = 4e6
"""Operations from which handing a part to another thread (about 20 microseconds) pays."""


class Workspace:
    """Scratch arrays for up to `max_rows` rows of a network, and `threads` - 1 helpers for its products.

    Which part a thread computes changes no bit of the result (see `mpiddl.kernels.dense.tile`), nor does its timing.
    """

    def __init__(self, sizes: tuple[int, ...], max_rows: int, dtype: DTypeLike, threads: int):
        dtype = float_dtype(dtype)
        self.max_rows = max_rows
        self.outputs = [aligned_zeros(max_rows * n, dtype).reshape(max_rows, n) for n in sizes[1:]]
        size = scratch_size(sizes, max_rows, dtype.itemsize)
        self.scratch = [aligned_zeros(size, dtype) for _ in range(threads)]
        self.pool = ThreadPoolExecutor(threads - 1, "mpiddl-product") if threads > 1 else None

    def layers(self, rows: int) -> list[np.ndarray]:
        """The output arrays, cut to `rows` rows."""
        if rows > self.max_rows:
            raise ShapeError(f"x: got {rows} rows, expected at most {self.max_rows}, the size of the workspace")
        return [array[:rows] for array in self.outputs]

    def share(self, kernel: Callable, size: int, operations: float, *arguments: object, first: int = 0) -> None:
        """Call ``kernel(*arguments, scratch, begin, end)`` for parts of range(first, size), one for each thread."""
        if self.pool is None or operations < WORTH_SHARING:
            kernel(*arguments, self.scratch[0], first, size)
            return
        units = -(-(size - first) // UNIT)
        threads = min(len(self.scratch), max(units, 1))  # no part is empty: two that begin alike would do the same work
        edges = [min(size, first + UNIT * (units * t // threads)) for t in range(threads + 1)]
        (own, mine), *rest = zip(self.scratch, pairwise(edges), strict=False)
        waiting = [self.pool.submit(kernel, *arguments, scratch, *part) for scratch, part in rest]
        kernel(*arguments, own, *mine)
        for part in waiting:
            part.result()


def scratch_size(sizes: tuple[int, ...], rows: int, itemsize: int) -> int:
    """Elements of scratch memory that the largest product of a network needs."""
    needs = [kernels.forward_scratch(itemsize)]
    for outputs in sizes[1:]:
        needs += [kernels.weight_gradient_scratch(rows, outputs, itemsize)]
        needs += [kernels.input_gradient_scratch(rows, outputs, itemsize)]
    return max(needs)
