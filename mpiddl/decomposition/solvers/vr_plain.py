"""VR-PCA as published, as a reference and for teaching: no warm start, no safeguard, one row a step.

    W = orth(C G), G Gaussian
    each epoch:  U = C W~, one exact pass
        m / P times on each rank:  W <- W + eta (x_i (x_i.W - x_i.W~ B) + U B),  W <- orth(W),  i uniform
        W~ = orth(mean over ranks of W, aligned with W~)

B is the rotation nearest to W~^T W (1 for one component). With P ranks each takes a P-th of the steps, P times as long: with
the length of one rank convergence would be P times slower an epoch. m = n and eta = 1 / (k r sqrt(n)), r being the mean of
||x_i||^2, are the papers'.

Cost an epoch: 2 passes, an all-reduce of d k numbers for U and one for the mean.

References
----------
O. Shamir, ICML 2015, arXiv:1409.2848, algorithm 1 (k = 1); ICML 2016, arXiv:1507.08788, algorithm 2 (k > 1). Ranks: ours; the
average of aligned bases is that of projectors to first order (J. Fan et al., Ann. Statist. 47, 2019, doi:10.1214/18-AOS1713).
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np

from mpiddl import kernels
from mpiddl.collectives import allreduce
from mpiddl.decomposition.rows.column_split import Whole
from mpiddl.decomposition.rows.covariance import Covariance
from mpiddl.decomposition.rows.dense import DenseRows
from mpiddl.decomposition.solvers.auto_choice import start_rows
from mpiddl.decomposition.solvers.base import Enough, Solver, Task
from mpiddl.decomposition.solvers.error_estimates import missed_variance
from mpiddl.decomposition.solvers.sample import draw, most_taken
from mpiddl.decomposition.solvers.subspace import Ritz
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm


class PlainVRSolver(Solver):
    """`vr_plain` from a sample's mean."""

    sparse = files = False
    compiled = slow = True

    def solve(self, task: Task, done: Enough) -> tuple[Covariance, Ritz]:
        comm, rows, n = task.comm, task.rows, task.n
        wanted = min(most_taken(comm, rows), start_rows(n, rows.d, task.columns))
        sample = draw(comm, rows, n, wanted, task.seed, task.effort)
        operator = Covariance(comm, rows, sample.mean, task.center, task.effort, spread=Whole(comm, rows.d))

        def over(ritz: Ritz) -> bool:
            return done(ritz, missed_variance(ritz, task.k), True) or operator.trace <= task.floor

        return operator, vr_plain(comm, operator, task.k, over, step=task.vr.step, seed=task.seed)


def vr_plain(comm: Comm, covariance: Covariance, k: int, done: Callable[[Ritz], bool], *, step: float = 1.0,
             seed: int = 0) -> Ritz:
    """``k`` leading eigenpairs; ``done`` is asked after every exact pass. ``step`` multiplies the published step size."""
    rows = covariance.rows
    assert isinstance(rows, DenseRows)  # `solve` has refused others
    random = np.random.default_rng([seed, comm.rank, 2])  # the same seed everywhere would walk P times the same path
    gaussian = np.random.default_rng([seed, 0]).standard_normal((rows.d, k))
    anchor = np.linalg.qr(covariance.apply(gaussian))[0]
    while True:
        image = covariance.apply(anchor)
        values, rotation = np.linalg.eigh(anchor.T @ image)
        values, anchor, image = values[::-1], anchor @ rotation[:, ::-1], image @ rotation[:, ::-1]
        residuals = image - anchor * values
        ritz = Ritz(values, anchor, residuals, residuals.T @ residuals)
        if comm.bcast(done(ritz)):
            return ritz
        rate = step * comm.size / (k * covariance.trace * sqrt(covariance.n))
        likely = rows.weights / rows.weights.sum(dtype=np.float64) if rows.weights.size else None
        chosen = random.choice(rows.n, covariance.n // comm.size, p=likely) if rows.n else np.zeros(0, np.int64)
        mean = covariance.mean * covariance.center
        take = _one if k == 1 else _block
        found = take(rows.x, mean, chosen, rate, image, anchor)
        message = _aligned(found, anchor) * (rows.total / covariance.total)
        allreduce(comm, IN_PLACE, message)
        covariance.effort.passes += 1
        covariance.effort.rounds += 1
        anchor = np.linalg.qr(message)[0]


def _one(x: np.ndarray, mean: np.ndarray, rows: np.ndarray, rate: float, gradient: np.ndarray,
         anchor: np.ndarray) -> np.ndarray:  # fmt: skip
    """Steps for one component, compiled."""
    w, still, exact, centre = (part.reshape(-1).astype(x.dtype) for part in (anchor, anchor, gradient, mean))
    kernels.plain_steps.plain_steps(x, centre, rows, rate, exact, still, w)
    return w.astype(np.float64)[:, None]


def _block(x: np.ndarray, mean: np.ndarray, rows: np.ndarray, rate: float, gradient: np.ndarray,
           anchor: np.ndarray) -> np.ndarray:  # fmt: skip
    """Steps for several components, as they are written."""
    w = anchor.copy()
    for i in rows:
        row = x[i] - mean
        rotation = _nearest_rotation(anchor.T @ w)
        w += rate * (np.outer(row, row @ w - (row @ anchor) @ rotation) + gradient @ rotation)
        w = np.linalg.qr(w)[0]
    return w


def _aligned(w: np.ndarray, anchor: np.ndarray) -> np.ndarray:
    """The basis of the span of ``w`` that is nearest to ``anchor``: averages of others would be of arbitrary signs."""
    return w @ _nearest_rotation(w.T @ anchor)


def _nearest_rotation(matrix: np.ndarray) -> np.ndarray:
    left, _, right = np.linalg.svd(matrix)
    return left @ right
