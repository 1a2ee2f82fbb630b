"""Rows of a SciPy matrix in compressed sparse rows, centred without being made dense.

For the mean m,  sum of s (x - m) (x - m)^T W = sum of s x (x W - m W)^T - m (sum of s (x W - m W))^T:  the entries that are
there, and a correction of rank one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpiddl import kernels
from mpiddl.decomposition.rows.base import Sums, padded, together
from mpiddl.decomposition.rows.dense import moved
from mpiddl.layout import block_bounds

DENSE_BYTES = 1 << 26
"""Of a block of rows that is made dense."""


class SparseRows:
    """Rows for solvers; a pass costs 4 nnz k operations.

    Parameters
    ----------
    x : scipy.sparse CSR matrix or array, shape (n, d), float32 or float64
    weights : ndarray, shape (n,), optional
        Of the rows; None: ones.
    threads : int
        That share a pass.
    """

    numbers: np.ndarray | None = None
    sparse = True

    def __init__(self, x: Any, weights: np.ndarray | None = None, threads: int = 1):
        if not x.has_canonical_format:
            x = x.copy()
            x.sum_duplicates()
        self.x, self.dtype = x, x.dtype
        self.n, self.d = x.shape
        self.weights = np.empty(0, x.dtype) if weights is None else weights.astype(x.dtype, copy=False)
        self.total = float(self.n if weights is None else weights.sum(dtype=np.float64))
        self.threads = threads
        self._starts = x.indptr.astype(np.int64)
        self._indices = x.indices.astype(np.int32, copy=False)

    def columns(self, k: int) -> int:
        return kernels.normal_product.padded_columns(k, self.dtype.itemsize)

    def sums(self, w: np.ndarray, origin: np.ndarray, moments: bool = False) -> Sums:
        columns = self.columns(w.shape[1])
        lines = padded(w, columns, self.dtype)
        start = -(origin @ lines).astype(self.dtype)

        def part(number: int) -> Sums:
            begin, end = block_bounds(self.n, self.threads, number)
            found = Sums.zeros(end - begin, self.d, columns, moments)
            own = self._starts[begin : end + 1], self._indices, self.x.data
            weights = self.weights[begin:end]
            scratch = np.empty(kernels.sparse_product.sparse_scratch(self.d, columns), self.dtype)
            kernels.sparse_product.sparse_product(*own, lines, start, weights, found.product, found.shifts, scratch)
            if moments:
                kernels.sparse_product.sparse_moments(*own, weights, found.moments, found.squares)
            return found

        found = together(part, self.threads, w.shape[1])
        if moments:  # about zero, so far
            first, second = found.moments
            second += origin * (self.total * origin - 2 * first)
            first -= self.total * origin
            roots = np.sqrt(self.weights) if self.weights.size else 1.0
            found.squares[:] = (np.sqrt(found.squares) + roots * np.linalg.norm(origin)) ** 2
        return found

    def weighted_sum(self) -> np.ndarray:
        weights = self.weights if self.weights.size else np.ones(self.n)
        return np.asarray(self.x.T @ weights.astype(np.float64)).reshape(-1)

    def take(self, rows: np.ndarray) -> SparseRows:
        return SparseRows(self.x[rows], self.weights[rows] if self.weights.size else None, self.threads)

    def moved(self, shift: np.ndarray, scale: float) -> SparseRows:
        x = self.x.copy()
        x.data = moved(x.data, np.zeros(1), scale)
        return SparseRows(x, self.weights if self.weights.size else None, self.threads)

    @property
    def most_taken(self) -> int:
        return self.n

    def blocks(self, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        most = max(1, min(most, DENSE_BYTES // (self.dtype.itemsize * self.d)))
        for begin in range(0, self.n, most):
            yield self.x[begin : begin + most].toarray(), self.weights[begin : begin + most]
