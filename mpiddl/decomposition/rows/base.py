"""What solvers need of a rank's rows, wherever they lie: a pass over them, X^T (X W), and a few of them as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np

BLOCK_BYTES = 1 << 21
"""Of rows that are multiplied with each other: the copy of them stays in the third cache."""


class Sums(NamedTuple):
    """What one pass adds up over rows x with weights s, all in float64; y = s (x W - m W), m being the origin.

    ``product`` (d, k) is the sum of x y^T, ``shifts`` (k,) that of y; ``moments`` (2, d) those of s (x - m) and of
    s (x - m)^2, or (0, d); ``squares`` (n,), where moments are asked for, s |x - m|^2 of each row, or
    a bit more, else (0,).
    """

    product: np.ndarray
    shifts: np.ndarray
    moments: np.ndarray
    squares: np.ndarray

    @classmethod
    def zeros(cls, n: int, d: int, k: int, moments: bool) -> Sums:
        return cls(np.zeros((d, k)), np.zeros(k), np.zeros((2 if moments else 0, d)), np.zeros(n if moments else 0))

    def add(self, other: Sums) -> None:
        """Take in what other rows add up to; their squares are left alone."""
        for mine, theirs in zip(self[:3], other[:3], strict=True):
            mine += theirs


class Rows(Protocol):
    """A rank's rows; ``total`` is the sum of their weights."""

    n: int
    d: int
    dtype: np.dtype
    total: float
    sparse: bool
    threads: int
    weights: np.ndarray
    numbers: np.ndarray | None
    """What rows were called, if not by their order."""

    def columns(self, k: int) -> int:
        """How many columns a pass takes that is asked for ``k``: the rest comes at no cost."""

    def sums(self, w: np.ndarray, origin: np.ndarray, moments: bool = False) -> Sums:
        """One pass over all rows; w (d, k) and origin (d,) are float64, ``moments`` asks for those of the columns."""

    def weighted_sum(self) -> np.ndarray:
        """Sum of all rows times their weights, (d,), float64."""

    def take(self, rows: np.ndarray) -> Rows:
        """Some of the rows, by ascending numbers, copied; at most `most_taken` of them are sensible."""

    @property
    def most_taken(self) -> int: ...

    def moved(self, shift: np.ndarray, scale: float) -> Rows:
        """Rows (x - shift) scale; sparse ones are only scaled."""

    def blocks(self, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All rows as dense arrays, at most that many at a time, and their weights (empty: ones)."""


def padded(array: np.ndarray, columns: int, dtype: np.dtype) -> np.ndarray:
    """A copy in ``dtype`` with zeros behind, so that it has ``columns`` columns."""
    copy = np.zeros((len(array), columns), dtype)
    copy[:, : array.shape[1]] = array
    return copy


def centred_blocks(rows: Rows, origin: np.ndarray, dtype: np.dtype) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All rows less ``origin`` and times the roots of their weights, and the roots, in ``dtype``; each block of rows is
    overwritten by the next."""
    most = max(256, BLOCK_BYTES // (rows.d * dtype.itemsize))
    room = np.empty((most, rows.d), dtype)
    centre = origin.astype(dtype)
    for x, weights in rows.blocks(most):
        moved = np.subtract(x, centre, out=room[: len(x)], casting="same_kind")
        roots = np.sqrt(weights, dtype=dtype) if weights.size else np.ones(len(moved), dtype)
        if weights.size:
            moved *= roots[:, None]
        yield moved, roots


def together(part: Callable[[int], Sums], threads: int, k: int) -> Sums:
    """The sum of ``part`` of every number, each by a thread of its own; the first ``k`` columns."""
    if threads == 1:
        parts = [part(0)]
    else:
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(part, range(threads)))
    first, *others = parts
    for other in others:
        first.add(other)
    squares = np.concatenate([found.squares for found in parts])
    return first._replace(product=first.product[:, :k], shifts=first.shifts[:k], squares=squares)
