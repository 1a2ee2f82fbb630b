"""Directions from a sample's covariance S: D solves (theta - S) D = R approximately, orthogonal to W.

A sample of m rows knows most of the spectrum; what it gets wrong, about sqrt(d / m) of it, is what a pass then
leaves of the error. S is formed once (m d^2 operations, one all-reduce of d^2 numbers), and solved with by a few steps of
conjugate gradients, several columns at a time, in float32: a few products of S, which stays in the cache, with a thin block.
Columns do not need each other: every rank has some of them, and an all-gather of d p numbers brings them together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiddl.collectives import allgather
from mpiddl.decomposition.rows.covariance import Covariance
from mpiddl.decomposition.solvers.auto_choice import sample_rows
from mpiddl.decomposition.solvers.base import Task
from mpiddl.decomposition.solvers.davidson import Directions
from mpiddl.decomposition.solvers.iterative import Iterative
from mpiddl.decomposition.solvers.sample import Sample, covariance, warm_start_of
from mpiddl.decomposition.solvers.subspace import Ritz
from mpiddl.transport.comm import Comm

STEPS = 6
"""Of conjugate gradients: the sample's own error is reached before."""


class Subsample:
    """Directions preconditioned by a sample's covariance (d, d), float32, the same on every rank."""

    def __init__(self, comm: Comm, sample: np.ndarray, steps: int = STEPS):
        self._comm, self._sample, self._steps = comm, sample, steps

    def __call__(self, ritz: Ritz) -> np.ndarray:
        """D (d, p).

        Communication
        -------------
        Collective: an all-gather of d p numbers in float32.
        """
        (d, p), comm = ritz.vectors.shape, self._comm
        width = -(-p // comm.size)
        mine = slice(width * comm.rank, width * (comm.rank + 1))
        found = np.zeros((width, d), np.float32)
        found[: len(ritz.values[mine])] = self._solved(ritz, mine).T
        if comm.size == 1:
            return found.T.astype(np.float64)
        columns = np.empty((width * comm.size, d), np.float32)
        allgather(comm, found, columns)
        return columns[:p].T.astype(np.float64)

    def _solved(self, ritz: Ritz, mine: slice) -> np.ndarray:
        """Some of the columns."""
        w = ritz.vectors.astype(np.float32)
        values = ritz.values[mine].astype(np.float32)
        scale = np.where(ritz.sizes > 0, ritz.sizes, 1)[mine]
        right = (ritz.residuals[:, mine] / scale).astype(np.float32)

        def product(z: np.ndarray) -> np.ndarray:
            image = z * values - self._sample @ z
            return image - w @ (w.T @ image)

        return solve(product, right - w @ (w.T @ right), self._steps)


class SubsampleSolver(Iterative):
    """`Iterative` with directions from a sample's covariance, and a start from the same sample."""

    def sample_rows(self, task: Task) -> int:
        return sample_rows(task.n, task.rows.d, task.columns)

    def begin(self, task: Task, operator: Covariance, sample: Sample, most: int) -> tuple[np.ndarray, Directions]:
        products = covariance(task.comm, sample, task.center, task.effort)
        if not np.isfinite(products).all():
            return super().begin(task, operator, sample, most)
        return warm_start_of(task.comm, products, task.columns, task.seed), Subsample(task.comm, products)


def solve(product: Callable[[np.ndarray], np.ndarray], right: np.ndarray, steps: int) -> np.ndarray:
    """Conjugate gradients for each column by itself; a column ends where the curvature is not positive.

    M. Hestenes, E. Stiefel, J. Res. NBS 49, 1952, doi:10.6028/jres.049.044.
    """
    found, rest, search = np.zeros_like(right), right.copy(), right.copy()
    size = np.einsum("ij,ij->j", rest, rest)
    live = size > 0
    for step in range(steps):
        image = product(search)
        curvature = np.einsum("ij,ij->j", search, image)
        live &= curvature > 0
        if not step:
            found[:, ~live] = right[:, ~live]  # steepest ascent where S sees no maximum
        if not live.any():
            break
        length = np.where(live, size / np.where(live, curvature, 1), 0)
        found += search * length
        rest -= image * length
        new = np.einsum("ij,ij->j", rest, rest)
        search = rest + search * np.where(live, new / np.where(size > 0, size, 1), 0)
        size = new
    return found
