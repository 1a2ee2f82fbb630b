"""Orthonormal bases of tall blocks, by products only: no column is treated by itself."""

from __future__ import annotations

import numpy as np

RANK = 1e-14
"""A direction whose square is below this part of the largest one is rounding."""


def orthonormal(block: np.ndarray, basis: np.ndarray | None = None) -> np.ndarray:
    """An orthonormal basis of ``block`` (d, k), orthogonal to ``basis``; fewer columns where it has less rank.

    Twice: project, then divide by the root of the Gram matrix, from its eigenvectors (SVQB: A. Stathopoulos, K. Wu, SIAM J.
    Sci. Comput. 23, 2002, doi:10.1137/S1064827500370883). 8 d k (m + k) operations for a basis of m columns.
    """
    for _ in range(2):
        if basis is not None:
            block = block - basis @ (basis.T @ block)
        sizes = np.sqrt(np.einsum("ij,ij->j", block, block))
        block = block[:, sizes > 0] / sizes[sizes > 0]
        values, vectors = np.linalg.eigh(block.T @ block)
        kept = values > RANK * values.max(initial=0.0)
        block = block @ (vectors[:, kept] / np.sqrt(values[kept]))
    return block
