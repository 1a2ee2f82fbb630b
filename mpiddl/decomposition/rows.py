"""A rank's rows in memory, and the one thing that solvers do with them: a pass, X^T (X W)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from mpiddl.collectives.base import block_bounds
from mpiddl.kernels.normal_product import normal_product, normal_scratch, padded_columns
from mpiddl.memory import aligned_zeros


class Sums(NamedTuple):
    """What one pass adds up over rows x with weights s, all in float64; y = s (x W - m W), m being the origin.

    ``product`` (d, k) is the sum of x y^T, ``shifts`` (k,) that of y; ``moments`` (2, d) those of s (x - m) and of
    s (x - m)^2, or (0, d).
    """

    product: np.ndarray
    shifts: np.ndarray
    moments: np.ndarray


class DenseRows:
    """Rows of a dense array.

    Parameters
    ----------
    x : ndarray, shape (n, d), float32 or float64, C-contiguous
    weights : ndarray, shape (n,), optional
        Of the rows; None: ones.
    threads : int
        That share a pass.
    """

    def __init__(self, x: np.ndarray, weights: np.ndarray | None = None, threads: int = 1):
        self.x, self.dtype = x, x.dtype
        self.n, self.d = x.shape
        self.weights = np.empty(0, x.dtype) if weights is None else weights.astype(x.dtype, copy=False)
        self.total = float(self.n if weights is None else weights.sum(dtype=np.float64))
        self.threads = max(1, min(threads, self.n // 256))
        self._kept: dict[tuple[int, int], np.ndarray] = {}

    def columns(self, k: int) -> int:
        """How many columns a pass takes that is asked for ``k``: the rest comes at no cost."""
        return padded_columns(k, self.x.itemsize)

    def sums(self, w: np.ndarray, origin: np.ndarray, moments: bool = False) -> Sums:
        """One pass over all rows: 4 n d k operations.

        w (d, k) and origin (d,) are float64; ``moments`` asks for those of the columns.
        """
        padded = self.columns(w.shape[1])
        lines = np.zeros((self.d, padded), self.dtype)
        lines[:, : w.shape[1]] = w
        start = -(origin @ lines).astype(self.dtype)
        centre = origin.astype(self.dtype)

        def part(number: int) -> Sums:
            begin, end = block_bounds(self.n, self.threads, number)
            found = Sums(np.zeros((self.d, padded)), np.zeros(padded), np.zeros((2 if moments else 0, self.d)))
            scratch = self._scratch(number, padded)
            weights = self.weights[begin:end]
            normal_product(self.x[begin:end], lines, start, weights, centre, *found, scratch)
            return found

        first, *others = _together(part, self.threads)
        for other in others:
            for mine, theirs in zip(first, other, strict=True):
                mine += theirs
        k = w.shape[1]
        return Sums(first.product[:, :k], first.shifts[:k], first.moments)

    def take(self, rows: np.ndarray) -> DenseRows:
        """Some of the rows, copied."""
        return DenseRows(self.x[rows], self.weights[rows] if self.weights.size else None, self.threads)

    def weighted_sum(self) -> np.ndarray:
        """Sum of all rows times their weights, (d,), float64."""
        if self.weights.size:
            return self.weights.astype(np.float64) @ self.x
        return self.x.sum(axis=0, dtype=np.float64)

    def blocks(self, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All rows, at most that many at a time, and their weights (empty: ones)."""
        for begin in range(0, self.n, most):
            yield self.x[begin : begin + most], self.weights[begin : begin + most]

    def _scratch(self, number: int, padded: int) -> np.ndarray:
        if (number, padded) not in self._kept:
            self._kept[number, padded] = aligned_zeros(normal_scratch(self.d, padded, self.x.itemsize), self.dtype)
        return self._kept[number, padded]


def _together(part, threads: int) -> list[Sums]:
    """``part`` of every number, each by a thread of its own."""
    if threads == 1:
        return [part(0)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(part, range(threads)))
