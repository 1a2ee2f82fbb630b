"""The direct way: form C, or for fewer rows than columns the products of the rows, and take its eigenvectors.

    d <= n:  C = X^T X / n,  C v = lambda v                          n d^2 operations, one all-reduce of d (d + 1) / 2 numbers
    n < d:   K = X X^T / n,  K u = lambda u,  v = X^T u / ||X^T u||    n^2 d operations, rows gathered by blocks of columns

Exact to the rounding of C: a component with less than 1e-16 of the largest variance is lost. Blocks are multiplied in float32
where that is asked for, which doubles the speed and leaves 1e-13 of the explained variance to chance; sums are float64.
"""

from __future__ import annotations

import numpy as np

from mpiddl.decomposition.rows.base import centred_blocks
from mpiddl.decomposition.rows.column_split import of_rank_0
from mpiddl.decomposition.rows.covariance import Covariance
from mpiddl.decomposition.rows.sums import allreduce
from mpiddl.decomposition.solvers.base import Enough, Solver, Task
from mpiddl.decomposition.solvers.sample import draw
from mpiddl.decomposition.solvers.subspace import Ritz
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm

COLUMNS_AT_ONCE = 4096

SMALL = 512
"""Rows of a matrix up to which numpy finds all eigenvectors in less time than it takes to import scipy.linalg."""


ROWS_OF_SMALL = 16_384
"""Fewer rows are multiplied in float64 whatever their dtype: it costs next to nothing."""

GRAM_ROUNDING = 1e-12
"""What a covariance formed in float32 leaves of explained variance: errors of 1e-7 in its entries turn components by as
much, and count squared."""


class GramSolver(Solver):
    """All eigenpairs that are wanted at once; `gram` says how."""

    def solve(self, task: Task, done: Enough) -> tuple[Covariance, Ritz]:
        sample = draw(task.comm, task.rows, task.n, 256, task.seed, task.effort)
        operator = Covariance(task.comm, task.rows, sample.mean, task.center, task.effort)
        single = task.tol >= GRAM_ROUNDING and task.n > ROWS_OF_SMALL
        return operator, gram(task.comm, operator, task.n, task.k, task.rows.dtype if single else np.dtype(np.float64))


def gram(comm: Comm, covariance: Covariance, n: int, k: int, dtype: np.dtype) -> Ritz:
    """The ``k`` leading eigenpairs of C, with zeros as residuals; ``n`` rows on all ranks together, multiplied in ``dtype``.

    Communication
    -------------
    Collective: as above, and a broadcast of the eigenpairs.
    """
    values, vectors = _columns(comm, covariance, k, dtype) if covariance.rows.d <= n else _rows(comm, covariance, k)
    covariance.effort.passes += 1
    return Ritz(np.maximum(values, 0.0), vectors, np.zeros_like(vectors), np.zeros((k, k)))


def _columns(comm: Comm, covariance: Covariance, k: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """From C, (d, d); its diagonal has the columns' variances, and their means come along."""
    rows, d = covariance.rows, covariance.rows.d
    products, sums, origin = np.zeros((d, d)), np.zeros(d), covariance.origin
    with np.errstate(over="ignore", invalid="ignore"):  # which `take_moments` says
        for moved, roots in centred_blocks(rows, origin, dtype):
            products += moved.T @ moved
            sums += roots @ moved
    upper = np.triu_indices(d)
    message = np.concatenate([products[upper], sums, [rows.total]])
    allreduce(comm, IN_PLACE, message)
    covariance.effort.rounds += 1
    products[upper] = message[: -d - 1]
    covariance.take_moments(np.stack([message[-d - 1 : -1], products.diagonal()]), message[-1])
    if covariance.center:
        apart = covariance.mean - origin
        products -= covariance.total * np.outer(apart, apart)
    products /= covariance.total
    return of_rank_0(comm, lambda: _leading(products, k))


def _rows(comm: Comm, covariance: Covariance, k: int) -> tuple[np.ndarray, np.ndarray]:
    """From K, (n, n)."""
    rows = covariance.rows
    covariance.measure()
    counts = comm.allgather(rows.n)
    begin, n = sum(counts[: comm.rank]), sum(counts)
    products = np.zeros((n, n))
    blocks = centred_blocks(rows, covariance.origin, np.dtype(np.float64))
    mine = np.concatenate([np.zeros((0, rows.d)), *(moved.copy() for moved, _ in blocks)])
    for left in range(0, rows.d, COLUMNS_AT_ONCE):
        part = np.ascontiguousarray(mine[:, left : left + COLUMNS_AT_ONCE])
        whole = np.concatenate(comm.allgather(part))
        products[begin : begin + rows.n] += part @ whole.T
        covariance.effort.rounds += 1
    allreduce(comm, IN_PLACE, products)
    values, left_vectors = of_rank_0(comm, lambda: _leading(products / covariance.total, k, lower=True))
    vectors = mine.T @ left_vectors[begin : begin + rows.n]
    allreduce(comm, IN_PLACE, vectors)
    covariance.effort.rounds += 2
    sizes = np.linalg.norm(vectors, axis=0)
    return values, complete(vectors, sizes > 1e-7 * sizes.max(initial=0.0))


def _leading(products: np.ndarray, k: int, lower: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The ``k`` largest eigenvalues of a symmetric matrix, of which one triangle counts, and their vectors."""
    n = len(products)
    if n <= SMALL:
        values, vectors = (part[..., n - k :] for part in np.linalg.eigh(products, UPLO="L" if lower else "U"))
        return values[::-1].copy(), vectors[:, ::-1].copy()
    from scipy.linalg import eigh

    values, vectors = eigh(products, lower=lower, subset_by_index=[n - k, n - 1] if k < n else None)
    if len(values) < k:  # LAPACK's evr loses some of a cluster
        values, vectors = (part[..., n - k :] for part in eigh(products, lower=lower))
    return values[::-1].copy(), vectors[:, ::-1].copy()


def complete(vectors: np.ndarray, sound: np.ndarray) -> np.ndarray:
    """Orthonormal columns; those that are not ``sound`` are replaced by some that are orthogonal to the others."""
    basis = np.linalg.qr(vectors[:, sound])[0]
    basis *= np.where(np.einsum("ij,ij->j", basis, vectors[:, sound]) < 0, -1.0, 1.0)
    missing = int((~sound).sum())
    result = np.empty_like(vectors)
    result[:, sound] = basis
    if missing:
        random = np.random.default_rng(0).standard_normal((len(vectors), missing))
        for _ in range(2):
            random -= basis @ (basis.T @ random)
        result[:, ~sound] = np.linalg.qr(random)[0]
    return result
