"""The parameters of a network in one flat array, and the gradient of a batch. No communication.

The flat array holds all weights, then all biases, the order of scikit-learn's L-BFGS.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from mpiddl import kernels
from mpiddl.layout import block_bounds
from mpiddl.memory import aligned_zeros

ACTIVATIONS = {"identity": "IDENTITY", "relu": "RELU", "tanh": "TANH", "logistic": "LOGISTIC"}
LOSSES = {"softmax": "SOFTMAX", "logistic": "BINARY", "identity": "SQUARED", "exp": "POISSON"}
"""Names among the kernels: by scikit-learn's `activation`, and by its `out_activation_`."""

WORTH_SHARING = 1e7
"""Operations of a batch from which a second thread pays: handing it a part costs 20 microseconds."""

NO_INDEX = np.empty(0, np.int64)


class Rows(NamedTuple):
    """Rows as the kernels take them.

    x is C-contiguous (n, d), or a CSR matrix; targets (n, k) are float64; weights (n,) have the dtype of x, or are empty.
    """

    x: Any
    targets: np.ndarray
    weights: np.ndarray

    def part(self, begin: int, end: int) -> Rows:
        """Rows from ``begin`` to ``end``, without a copy if they are dense."""
        return Rows(self.x[begin:end], self.targets[begin:end], self.weights[begin:end])


class Network:
    """Parameters, gradient and scratch memory.

    Parameters
    ----------
    coefs, intercepts : sequences of ndarray
        Values to start from, in scikit-learn's form. They are copied.
    activation, out_activation : str
        scikit-learn's names.
    most_rows : int
        Rows of the largest batch.
    threads : int
        Threads that share the rows of a batch. Each has a gradient of its own.

    Attributes
    ----------
    flat, grad : ndarray, shape (P,)
    weights : slice
        Where the weights lie in them. The biases are the rest.
    """

    def __init__(self, coefs: Sequence[np.ndarray], intercepts: Sequence[np.ndarray], activation: str, out_activation: str,
                 most_rows: int, threads: int = 1):
        self._sizes = np.array([coefs[0].shape[0], *(coef.shape[1] for coef in coefs)], np.int64)
        self.flat = self.gathered([*coefs, *intercepts])
        self.weights = slice(0, sum(coef.size for coef in coefs))
        self._codes = getattr(kernels, ACTIVATIONS[activation]), getattr(kernels, LOSSES[out_activation])
        self._eps = float(np.finfo(self.flat.dtype).eps)
        per_thread = -(-most_rows // threads) if self._worth_sharing(most_rows, threads) else most_rows
        self._threads = threads if per_thread < most_rows else 1
        self._spaces = [_Space(self._sizes, per_thread, self.flat) for _ in range(self._threads)]
        self.grad = self._spaces[0].grad
        self._pool = ThreadPoolExecutor(threads - 1, "mpiddl-network") if self._threads > 1 else None

    def gathered(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Arrays that belong to the parameters, in scikit-learn's form, copied into one flat array."""
        flat = aligned_zeros(sum(array.size for array in arrays), arrays[0].dtype)
        for view, array in zip(self.views(flat), arrays, strict=True):
            view[...] = array
        return flat

    def views(self, flat: np.ndarray) -> list[np.ndarray]:
        """Weights, then biases, of a flat array: views in scikit-learn's form."""
        shapes = [*map(tuple, pairwise(self._sizes)), *((size,) for size in self._sizes[1:])]
        edges = [0, *accumulate(int(np.prod(shape)) for shape in shapes)]
        return [flat[begin:end].reshape(shape) for (begin, end), shape in zip(pairwise(edges), shapes, strict=True)]

    def gradient(self, rows: Rows, index: np.ndarray = NO_INDEX) -> float:
        """The gradient of the sum of weight * loss over ``rows``, or those of an ``index``, in `grad`; returns the sum."""
        count = index.size or rows.x.shape[0]
        parts = self._threads if self._worth_sharing(count, self._threads) else 1
        if parts == 1:
            return self._part(self._spaces[0], rows, index)
        edges = [block_bounds(count, parts, part) for part in range(parts)]
        cut = [(rows, index[begin:end]) if index.size else (rows.part(begin, end), index) for begin, end in edges]
        assert self._pool is not None
        others = [self._pool.submit(self._part, space, *each) for space, each in zip(self._spaces[1:], cut[1:], strict=True)]
        total = self._part(self._spaces[0], *cut[0])
        for space, other in zip(self._spaces[1:], others, strict=True):
            total += other.result()
            self.grad += space.grad
        return total

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _worth_sharing(self, rows: int, threads: int) -> bool:
        operations = 4 * rows * sum(int(n) * int(m) for n, m in pairwise(self._sizes))
        return rows >= threads > 1 and operations >= WORTH_SHARING

    def _part(self, space: _Space, rows: Rows, index: np.ndarray) -> float:
        activation, loss = self._codes
        common = rows.targets, rows.weights, self._sizes, activation, loss, self._eps, self.flat, space.grad, space.layers
        if isinstance(rows.x, np.ndarray):
            return kernels.network_gradient(rows.x, index, *common, space.batch(rows.x, index), space.scratch)
        x = rows.x
        return kernels.sparse_network_gradient(x.indptr, x.indices, x.data, index, *common, space.scratch)


class _Space:
    """What one thread writes to for a batch of up to ``most_rows`` rows."""

    def __init__(self, sizes: np.ndarray, most_rows: int, flat: np.ndarray):
        self.grad = aligned_zeros(flat.size, flat.dtype)
        self.layers = aligned_zeros(most_rows * int(sizes[1:].sum()), flat.dtype)
        self.scratch = aligned_zeros(kernels.network_scratch(tuple(map(int, sizes)), most_rows, flat.itemsize), flat.dtype)
        self._most = most_rows
        self._batch = flat[:0]

    def batch(self, x: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Memory for the rows of a batch that lie apart."""
        if index.size and not self._batch.size:
            self._batch = aligned_zeros(self._most * x.shape[1], x.dtype)
        return self._batch
