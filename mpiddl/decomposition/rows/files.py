"""Rows of a file that need not fit into memory: read a chunk at a time, the next one while one is worked on.

Passes go to and fro: what the system has kept in memory of the last pass comes first in the next one.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from mpiddl import kernels
from mpiddl.decomposition.rows.base import Sums
from mpiddl.decomposition.rows.dense import DenseRows, moved

CHUNK_BYTES = 1 << 26
"""Of rows that are in memory at a time; twice as much with the one that is being read."""

SAMPLE_BYTES = 1 << 27
"""Of rows that are kept from a file."""

PAGE = mmap.ALLOCATIONGRANULARITY


Piece = TypeVar("Piece")
Loaded = TypeVar("Loaded")


class FileRows:
    """Rows for solvers that stay in a file; a pass reads them once.

    Parameters
    ----------
    read : callable
        ``read(begin, end)`` gives rows as an array (end - begin, d) of `dtype`, C-contiguous, which may be a view of a mapped
        file. Chunks and mini-batches are read by another thread.
    n, d : int
    dtype : dtype
        float32 or float64.
    weights : ndarray, shape (n,), optional
        Of the rows; None: ones.
    threads : int
        That share the products with a chunk.
    """

    numbers: np.ndarray | None = None
    sparse = False

    def __init__(self, read: Callable[[int, int], np.ndarray], n: int, d: int, dtype: np.dtype,
                 weights: np.ndarray | None = None, threads: int = 1):
        self._read, self.n, self.d, self.dtype, self.threads = read, n, d, np.dtype(dtype), threads
        self.weights = np.empty(0, dtype) if weights is None else weights.astype(dtype, copy=False)
        self.total = float(n if weights is None else weights.sum(dtype=np.float64))
        self._row_bytes = max(1, self.d * self.dtype.itemsize)
        self._chunk = max(kernels.normal_product.BLOCK, CHUNK_BYTES // self._row_bytes)
        self._forward = True
        probe = read(0, n) if n and mapping(read(0, 1)) is not None else None
        owner = mapping(probe)
        self._map = probe if owner is not None else None
        if owner is not None:  # what is wanted is asked for; beside a row that is missed nothing else shall be read
            owner.madvise(mmap.MADV_RANDOM)

    def moved(self, shift: np.ndarray, scale: float) -> FileRows:
        def read(begin: int, end: int) -> np.ndarray:
            return moved(self._read(begin, end), shift, scale)

        weights = self.weights if self.weights.size else None
        return FileRows(read, self.n, self.d, self.dtype, weights, self.threads)

    @property
    def most_taken(self) -> int:
        return max(1, SAMPLE_BYTES // self._row_bytes)

    def columns(self, k: int) -> int:
        return kernels.normal_product.padded_columns(k, self.dtype.itemsize)

    def sums(self, w: np.ndarray, origin: np.ndarray, moments: bool = False) -> Sums:
        found = Sums.zeros(self.n, self.d, w.shape[1], moments)
        parts = [range(begin, min(begin + self._chunk, self.n)) for begin in range(0, self.n, self._chunk)]
        if not self._forward:
            parts.reverse()
        self._forward = not self._forward
        for part, rows in zip(parts, self._chunks(parts), strict=True):
            own = rows.sums(w, origin, moments)
            found.add(own)
            if moments:
                found.squares[part.start : part.stop] = own.squares
        return found

    def weighted_sum(self) -> np.ndarray:
        total = np.zeros(self.d)
        for x, weights in self.blocks(self._chunk):
            total += DenseRows(x, weights if weights.size else None).weighted_sum()
        return total

    def take(self, rows: np.ndarray) -> DenseRows:
        if self._map is not None:
            self._ask(rows, 1)
            x = self._map[rows]
        else:
            x = np.empty((len(rows), self.d), self.dtype)
            for place, row in enumerate(rows.tolist()):
                x[place] = self._read(row, row + 1)[0]
        return DenseRows(x, self.weights[rows] if self.weights.size else None, self.threads)

    def blocks(self, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        step = min(most, self._chunk)
        for rows in self._chunks([range(begin, min(begin + step, self.n)) for begin in range(0, self.n, step)]):
            yield rows.x, rows.weights

    def steps_at_once(self, batch: int) -> int:
        return max(1, self._chunk // batch)

    def gathered(self, groups: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        block = kernels.normal_product.BLOCK

        def gather(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            if self._map is not None:
                self._ask(starts.reshape(-1), block)
                for start in starts.reshape(-1).tolist():
                    _touch(self._map[start : start + block])
                return self._map, self.weights, starts
            x = np.zeros((starts.size, block, self.d), self.dtype)
            weights = np.zeros((starts.size, block), self.dtype)  # rows that are not there weigh nothing
            for rows, line, start in zip(x, weights, starts.reshape(-1).tolist(), strict=True):
                found = self._read(start, min(start + block, self.n))
                rows[: len(found)] = found
                line[: len(found)] = self.weights[start : start + block] if self.weights.size else 1
            return x.reshape(-1, self.d), weights.reshape(-1), np.arange(0, block * starts.size, block).reshape(starts.shape)

        return _ahead(gather, groups)

    def _chunks(self, parts: Sequence[range]) -> Iterator[DenseRows]:
        def load(part: range) -> DenseRows:
            x = self._read(part.start, part.stop)
            owner = mapping(x)
            if owner is not None:
                _fetch(owner, x, [slice(None)])
                _touch(x)
            return DenseRows(x, self.weights[part.start : part.stop] if self.weights.size else None, self.threads)

        return _ahead(load, parts)

    def _ask(self, starts: np.ndarray, count: int) -> None:
        """Ask for ``count`` rows from each of some places: a disk serves many at once as fast as one."""
        owner = mapping(self._map)
        assert owner is not None and self._map is not None
        _fetch(owner, self._map, [slice(start, start + count) for start in starts.tolist()])


def _fetch(owner: mmap.mmap, array: np.ndarray, pieces: list[slice]) -> None:
    """Ask the system to read some rows of an array that shows a mapped file."""
    base = np.frombuffer(owner, np.uint8).ctypes.data
    for piece in pieces:
        part = array[piece]
        if part.size:
            begin = part.ctypes.data - base
            aligned = begin // PAGE * PAGE
            owner.madvise(mmap.MADV_WILLNEED, aligned, begin + part.nbytes - aligned)


def _touch(array: np.ndarray) -> None:
    """Wait until all pages of a C-contiguous array are there."""
    array.reshape(-1)[:: max(1, PAGE // array.itemsize)].max(initial=0)


def mapping(array: object) -> mmap.mmap | None:
    """The mapped file that an array is a view of."""
    while array is not None and not isinstance(array, mmap.mmap):
        array = getattr(array, "base", None)
    return array


def _ahead(load: Callable[[Piece], Loaded], pieces: Iterable[Piece]) -> Iterator[Loaded]:
    """``load`` of every piece, by a thread that is one piece ahead."""
    with ThreadPoolExecutor(1, "mpiddl-read-ahead") as pool:
        coming = None
        for piece in pieces:
            coming, now = pool.submit(load, piece), coming
            if now is not None:
                yield now.result()
        if coming is not None:
            yield coming.result()
