"""How much explained variance is still missed, from residuals alone."""

from __future__ import annotations

import numpy as np

from mpiddl.decomposition.davidson import Ritz


def missed_variance(ritz: Ritz, k: int) -> np.ndarray:
    """For each of the first ``k`` components an estimate of its eigenvalue minus its Ritz value, shape (k,).

    The smaller of ||r|| and ||r||^2 / gap, the gap being that to the first eigenvalue which is not wanted: mixtures among the
    wanted ones cost no explained variance. A bound if the block has met every leading eigenvector (B. Parlett, The
    Symmetric Eigenvalue Problem, 1998, doi:10.1137/1.9781611971163, theorems 4.5.1 and 11.7.1), as a random start does with
    probability one, and if the first unwanted eigenvalue is where the same rule puts it.
    """
    sizes = np.sqrt(np.einsum("ij,ij->j", ritz.residuals, ritz.residuals))
    if len(ritz.values) <= k:
        return sizes[:k]
    unwanted = ritz.values[k] + _error(sizes[k : k + 1], ritz.values[k : k + 1] - ritz.values[-1])[0]
    return _error(sizes[:k], ritz.values[:k] - unwanted)


def at_rounding(ritz: Ritz, k: int, dtype: np.dtype, times: float) -> bool:
    """Whether nothing is left to find in the first ``k`` residuals but the rounding of products in ``dtype``."""
    sizes = np.sqrt(np.einsum("ij,ij->j", ritz.residuals[:, :k], ritz.residuals[:, :k]))
    return bool(sizes.max(initial=0.0) <= times * np.finfo(dtype).eps * ritz.values[0])


def _error(sizes: np.ndarray, gaps: np.ndarray) -> np.ndarray:
    squares = np.divide(sizes**2, gaps, out=np.full(len(sizes), np.inf), where=gaps > 0)
    return np.minimum(sizes, squares)
