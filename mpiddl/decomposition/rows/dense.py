"""Rows of a dense array, in memory or mapped from a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from mpiddl import kernels
from mpiddl.data.arrays import refuse_masked
from mpiddl.decomposition.rows.base import Sums, padded, together
from mpiddl.layout import block_bounds
from mpiddl.memory import aligned_zeros, for_kernels

LEAST_OF_A_THREAD = 500_000
"""Elements: fewer are done sooner than a thread is started."""

COLUMNS = 8
"""Columns of a pass without kernels come in multiples of it: a wider block converges in fewer passes."""

LARGE = 4 << 20
"""Bytes from which on numpy asks for large pages."""


class DenseRows:
    """Rows for solvers; a pass costs 4 n d k operations and reads them once.

    Parameters
    ----------
    x : ndarray, shape (n, d), float32 or float64, C-contiguous
    weights : ndarray, shape (n,), optional
        Of the rows; None: ones.
    threads : int
        That share a pass.
    compiled : bool
        A pass is made by a kernel, else by numpy in float64, which is as fast for few rows and loads no compiler.
    """

    numbers: np.ndarray | None = None
    sparse = False

    def __init__(self, x: np.ndarray, weights: np.ndarray | None = None, threads: int = 1,
                 compiled: bool = True):
        refuse_masked(x, "x")
        self.x, self.dtype = for_kernels(np.asarray(x)), x.dtype
        self.n, self.d = x.shape
        self.weights = np.empty(0, x.dtype) if weights is None else for_kernels(weights.astype(x.dtype, copy=False))
        self.total = float(self.n if weights is None else weights.sum(dtype=np.float64))
        self.threads, self.compiled = threads, compiled
        self._kept: dict[tuple[int, int], np.ndarray] = {}

    def columns(self, k: int) -> int:
        return kernels.normal_product.padded_columns(k, self.dtype.itemsize) if self.compiled else -(-k // COLUMNS) * COLUMNS

    def sums(self, w: np.ndarray, origin: np.ndarray, moments: bool = False) -> Sums:
        if not self.compiled:
            return self._sums_without_kernels(w, origin, moments)
        columns = self.columns(w.shape[1])
        parts = max(1, min(self.threads, self.x.size // LEAST_OF_A_THREAD))
        lines = padded(w, columns, self.dtype)
        start, centre = -(origin @ lines).astype(self.dtype), origin.astype(self.dtype)

        def part(number: int) -> Sums:
            begin, end = block_bounds(self.n, parts, number)
            found, weights = Sums.zeros(end - begin, self.d, columns, moments), self.weights[begin:end]
            scratch = self._scratch(number, columns)
            kernels.normal_product.normal_product(self.x[begin:end], lines, start, weights, centre, *found, scratch)
            return found

        return together(part, parts, w.shape[1])

    def _sums_without_kernels(self, w: np.ndarray, origin: np.ndarray, moments: bool) -> Sums:
        weights = self.weights.astype(np.float64)[:, None] if self.weights.size else np.float64(1)
        with np.errstate(over="ignore", invalid="ignore"):  # which `Covariance` finds out
            x = self.x.astype(np.float64)
            y = weights * (x @ w - origin @ w)
            found = Sums(x.T @ y, y.sum(axis=0), np.zeros((0, self.d)), np.zeros(0))
            if not moments:
                return found
            x -= origin
            first, second = weights * x, weights * x**2
        return found._replace(moments=np.stack([first.sum(axis=0), second.sum(axis=0)]), squares=second.sum(axis=1))

    def weighted_sum(self) -> np.ndarray:
        if self.weights.size:
            return self.weights.astype(np.float64) @ self.x
        return self.x.sum(axis=0, dtype=np.float64)

    def take(self, rows: np.ndarray) -> DenseRows:
        # A new array of this size, untouched behind its end, gets large pages from numpy, and far fewer page faults.
        room = np.empty(max(len(rows) * self.d, LARGE // self.dtype.itemsize), self.dtype)
        taken = np.take(self.x, rows, axis=0, out=room[: len(rows) * self.d].reshape(len(rows), self.d), mode="clip")
        return DenseRows(taken, self.weights[rows] if self.weights.size else None, self.threads, self.compiled)

    def moved(self, shift: np.ndarray, scale: float) -> DenseRows:
        weights = self.weights if self.weights.size else None
        return DenseRows(moved(self.x, shift, scale), weights, self.threads, self.compiled)

    @property
    def most_taken(self) -> int:
        return self.n

    def steps_at_once(self, batch: int) -> int:
        """Mini-batches of so many rows that `gathered` should be asked for together."""
        return max(1, self.n)

    def gathered(self, groups: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each array of row numbers, at which groups of BLOCK adjacent rows begin: an array of rows that holds them, its
        weights (empty: ones), and where they begin there."""
        return ((self.x, self.weights, places) for places in groups)

    def blocks(self, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for begin in range(0, self.n, most):
            yield self.x[begin : begin + most], self.weights[begin : begin + most]

    def _scratch(self, number: int, columns: int) -> np.ndarray:
        if (number, columns) not in self._kept:
            size = kernels.normal_product.normal_scratch(self.d, columns, self.dtype.itemsize)
            self._kept[number, columns] = aligned_zeros(size, self.dtype)
        return self._kept[number, columns]


def moved(x: np.ndarray, shift: np.ndarray, scale: float) -> np.ndarray:
    """(x - shift) scale, in the dtype of x; ``scale`` is a power of two, which two factors may fit where it does not."""
    half = 2.0 ** (round(np.log2(scale)) // 2)
    result = x - shift.astype(x.dtype)
    result *= x.dtype.type(half)
    result *= x.dtype.type(scale / half)
    return result
