"""Orthonormal bases of tall blocks, by products only: no column is treated by itself."""

from __future__ import annotations

from functools import partial

import numpy as np

from mpiddl.decomposition.spread import Spread

RANK = 1e-14
"""A direction whose square is below this part of the largest one is rounding."""

NEAR = 1e-8
"""A Gram matrix so near to the identity needs one step of its inverse root's series, which squares the distance."""

KEPT = 0.25
"""An orthonormal direction of which a second projection leaves less, squared, was rounding, too: it lies in the basis."""


def orthonormal(spread: Spread, block: np.ndarray, basis: np.ndarray | None = None) -> np.ndarray:
    """An orthonormal basis of ``block`` (d, k), orthogonal to ``basis``; fewer columns where it has less rank.

    Two times and once more where that was not enough: project, then divide by the root of the Gram matrix, from its
    eigenvectors (SVQB: A. Stathopoulos, K. Wu, SIAM J. Sci. Comput. 23, 2002, doi:10.1137/S1064827500370883), or to first
    order where that is all it takes. 8 d k (m + k) operations for a basis of m columns.

    Communication
    -------------
    Collective where vectors are sliced: sums of (m, k) and (k, k) numbers and a broadcast of (k, k), each two or three times.
    """
    for turn in range(3):
        if basis is not None and basis.shape[1]:
            block = block - basis @ spread.sum(basis.T @ block)
        gram = spread.sum(block.T @ block)
        off = gram - np.eye(len(gram))
        if turn and np.abs(off).max(initial=0.0) < NEAR:
            return block - block @ off / 2
        root, done = spread.decided(partial(_inverse_root, gram, KEPT if turn else None))
        block = block @ root
        if turn and done:
            break
    return block


def _inverse_root(gram: np.ndarray, least: float | None) -> tuple[np.ndarray, bool]:
    """What makes columns with these products orthonormal, of directions with squares above ``least`` or, where columns have
    yet to be scaled, above rounding; and whether rounding has nothing to add."""
    sizes = np.sqrt(gram.diagonal())
    some = np.flatnonzero(sizes > 0)
    scale = np.ones(len(some)) if least else 1 / sizes[some]
    values, vectors = np.linalg.eigh(gram[np.ix_(some, some)] * np.outer(scale, scale))
    kept = values > (least or RANK * values.max(initial=0.0))
    root = np.zeros((len(gram), int(kept.sum())))
    root[some] = scale[:, None] * vectors[:, kept] / np.sqrt(values[kept])
    return root, values.min(initial=1.0) > 1 - 1e-6
