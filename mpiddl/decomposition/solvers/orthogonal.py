"""Orthonormal bases of tall blocks, by products only: no column is treated by itself."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import numpy as np

from mpiddl.decomposition.rows.column_split import Spread

RANK = 1e-14
"""A direction whose square is below this part of the largest one is rounding."""

NEAR = 1e-8
"""A Gram matrix so near to the identity needs one step of its inverse root's series, which squares the distance."""

APART = 1e-6
"""Squares of columns beyond those before them, from which on none of them is anything like rounding."""

KEPT = 0.25
"""An orthonormal direction of which a second projection leaves less, squared, was rounding, too: it lies in the basis."""


def orthonormal(spread: Spread, block: np.ndarray, basis: np.ndarray | None = None,
                along: np.ndarray | None = None) -> np.ndarray:
    """An orthonormal basis of ``block`` (d, k), orthogonal to ``basis`` (d, m); fewer columns where it has less rank.

    ``along`` (m, k) is the product basis^T block, if it is known.

    Two times and once more where that was not enough: project, then divide by a root of the Gram matrix: its triangle
    (Y. Yamamoto et al., ETNA 44, 2015, pp. 306-326: Cholesky QR2); where columns are not well apart, from eigenvectors
    (SVQB: A. Stathopoulos, K. Wu, SIAM J. Sci. Comput. 23, 2002, doi:10.1137/S1064827500370883); or the root to first order
    where that is all it takes. 8 d k (m + k) operations for a basis of m columns.

    Communication
    -------------
    Collective where vectors are sliced: sums of (m, k) and (k, k) numbers and a broadcast of (k, k), each two or three times.
    """
    for turn in range(3):
        if basis is not None and basis.shape[1]:
            block = block - basis @ (spread.sum(basis.T @ block) if turn or along is None else along)
        gram = spread.sum(block.T @ block)
        off = gram - np.eye(len(gram))
        if turn and np.abs(off).max(initial=0.0) < NEAR:
            return block - block @ off / 2
        root, done = spread.decided(partial(_inverse_root, gram, turn > 0))
        block = block @ root
        if turn and done:
            break
    return block


def _inverse_root(gram: np.ndarray, scaled: bool) -> tuple[np.ndarray, bool]:
    """What makes columns with these products orthonormal, and whether rounding has nothing to add.

    Where columns are well apart, a triangle does (Cholesky QR), which costs a tenth of eigenvectors. Else directions are left
    out that are rounding: all that are small where columns have been ``scaled`` before, or beside the largest.
    """
    squares = gram.diagonal()
    if squares.size and squares.min() > 0:
        scale = np.ones(len(gram)) if scaled else 1 / np.sqrt(squares)
        with suppress(np.linalg.LinAlgError):
            lower = np.linalg.cholesky(gram * np.outer(scale, scale))
            least = lower.diagonal().min() ** 2
            if least > (0.5 if scaled else APART):
                return scale[:, None] * np.linalg.inv(lower).T, least > 1 - 1e-6
    some = np.flatnonzero(squares > 0)
    scale = np.ones(len(some)) if scaled else 1 / np.sqrt(squares[some])
    values, vectors = np.linalg.eigh(gram[np.ix_(some, some)] * np.outer(scale, scale))
    kept = values > (KEPT if scaled else RANK * values.max(initial=0.0))
    root = np.zeros((len(gram), int(kept.sum())))
    root[some] = scale[:, None] * vectors[:, kept] / np.sqrt(values[kept])
    return root, values.min(initial=1.0) > 1 - 1e-6
