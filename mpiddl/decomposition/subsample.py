"""Directions from a sample's covariance S: D solves (theta - S) D = R approximately, orthogonal to W.

A sample of m rows knows most of the spectrum; what it gets wrong, about sqrt(d / m) of it, is what a pass then
leaves of the error. S is formed once (m d^2 operations, one all-reduce of d^2 numbers), and solved with by a few steps of
conjugate gradients, all columns at a time, in float32: a few products of S, which stays in the cache, with a thin block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiddl.decomposition.subspace import Ritz

STEPS = 6
"""Of conjugate gradients: the sample's own error is reached before."""


class Subsample:
    """Directions preconditioned by a sample's covariance (d, d), float32."""

    def __init__(self, sample: np.ndarray, steps: int = STEPS):
        self._sample, self._steps = sample, steps

    def __call__(self, ritz: Ritz) -> np.ndarray:
        """D (d, p)."""
        w = ritz.vectors.astype(np.float32)
        values = ritz.values.astype(np.float32)
        right = (ritz.residuals / np.where(ritz.sizes > 0, ritz.sizes, 1)).astype(np.float32)

        def product(z: np.ndarray) -> np.ndarray:
            image = z * values - self._sample @ z
            return image - w @ (w.T @ image)

        return solve(product, right - w @ (w.T @ right), self._steps).astype(np.float64)


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
        if not live.any():
            break
        length = np.where(live, size / np.where(live, curvature, 1), 0)
        found += search * length
        rest -= image * length
        new = np.einsum("ij,ij->j", rest, rest)
        search = rest + search * np.where(live, new / np.where(size > 0, size, 1), 0)
        size = new
        if step == 0:
            found[:, ~live] = right[:, ~live]  # steepest ascent where S sees no maximum
    return found
