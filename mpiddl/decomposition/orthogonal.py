"""Orthonormal bases of tall blocks, by products only: no column is treated by itself."""

from __future__ import annotations

import numpy as np

RANK = 1e-14
"""A direction whose square is below this part of the largest one is rounding."""

NEAR = 1e-8
"""A Gram matrix so near to the identity needs one step of its inverse root's series, which squares the distance."""

KEPT = 0.25
"""An orthonormal direction of which a second projection leaves less, squared, was rounding, too: it lies in the basis."""


def orthonormal(block: np.ndarray, basis: np.ndarray | None = None) -> np.ndarray:
    """An orthonormal basis of ``block`` (d, k), orthogonal to ``basis``; fewer columns where it has less rank.

    Two times and once more where that was not enough: project, then divide by the root of the Gram matrix, from its
    eigenvectors (SVQB: A. Stathopoulos, K. Wu, SIAM J. Sci. Comput. 23, 2002, doi:10.1137/S1064827500370883), or to first
    order where that is all it takes. 8 d k (m + k) operations for a basis of m columns.
    """
    for turn in range(3):
        if basis is not None:
            block = block - basis @ (basis.T @ block)
        if not turn:
            sizes = np.sqrt(np.einsum("ij,ij->j", block, block))
            block = block[:, sizes > 0] / sizes[sizes > 0]
        gram = block.T @ block
        off = gram - np.eye(len(gram))
        if turn and np.abs(off).max(initial=0.0) < NEAR:
            return block - block @ off / 2
        values, vectors = np.linalg.eigh(gram)
        kept = values > (KEPT if turn else RANK * values.max(initial=0.0))
        block = block @ (vectors[:, kept] / np.sqrt(values[kept]))
        if turn and values.min(initial=1.0) > 1 - 1e-6:
            break
    return block
