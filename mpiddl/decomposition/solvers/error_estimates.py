"""How much explained variance is still missed, from residuals alone."""

from __future__ import annotations

import numpy as np

from mpiddl.decomposition.solvers.subspace import Ritz


def missed_variance(ritz: Ritz, k: int) -> np.ndarray:
    """For each of the first ``k`` components an estimate of its eigenvalue minus its Ritz value, shape (k,).

    To second order in the residuals the eigenvalues are those of diag(theta) + R^T (theta - C')^-1 R, C' being what C is
    outside of the block. C' is replaced by its largest eigenvalue, the first that is not in the block; the block may end
    anywhere behind the wanted ones, and the end that gives the smallest sum is taken. Where that gap is too small, ||r|| bounds
    a component. A bound to that order if the block has met every leading eigenvector, as a random start does with probability
    one (B. Parlett, The Symmetric Eigenvalue Problem, 1998, doi:10.1137/1.9781611971163, theorems 4.5.1, 11.7.1; the choice of
    the end is ours).
    """
    values, p = ritz.values, len(ritz.values)
    sizes = ritz.sizes
    doubt = np.broadcast_to(ritz.doubt, p)[:k]
    if p <= k:
        return sizes[:k] + doubt
    unit = np.where(sizes > 0, sizes, 1)
    ends = np.array(sorted({k, (k + p) // 2, p - 1}))
    outside = values[ends] + _error(sizes[ends], values[ends] - values[-1])
    own = np.where(np.arange(p) < ends[:, None], _error(sizes, values - outside[:, None]), 0.0)
    roots = np.sqrt(own) / unit
    # What is behind the end stays apart, and below, where it raises nothing.
    matrices = ritz.products * roots[:, :, None] * roots[:, None, :] + np.diag(values)
    missed = np.maximum(np.linalg.eigvalsh(matrices)[:, : -k - 1 : -1] - values[:k], own[:, :k])
    return missed[missed.sum(axis=1).argmin()] + doubt


def at_rounding(ritz: Ritz, k: int, dtype: np.dtype, times: float) -> bool:
    """Whether nothing is left to find in the first ``k`` residuals but the rounding of products in ``dtype``."""
    return bool(ritz.sizes[:k].max(initial=0.0) <= times * np.finfo(dtype).eps * ritz.values[0])


def _error(sizes: np.ndarray, gaps: np.ndarray) -> np.ndarray:
    squares = np.divide(sizes**2, gaps, out=np.full(np.shape(gaps), np.inf), where=gaps > 0)
    return np.minimum(sizes, squares)
