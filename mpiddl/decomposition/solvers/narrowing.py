"""Fewer columns for a pass where the rest would bring next to nothing: the wanted components do not converge alike.

To first order a direction d_j for a component with residual r_j and a gap g_j to the rest of the spectrum finds |r_j|^2 / g_j
of explained variance. So the columns d_j |r_j| / (sqrt(g_j) |d_j|) carry what there is to find as their squared singular
values, and the leading singular vectors are the columns worth a pass. A block of half the width costs half a pass.

This goes further than locking (B. Parlett, The Symmetric Eigenvalue Problem, 1998, doi:10.1137/1.9781611971163, section 13.8),
which waits for single components to be done; the rule is ours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiddl.decomposition.rows.column_split import Spread
from mpiddl.decomposition.solvers.subspace import Ritz

LEFT_OUT = 0.01
"""Of what there is to find, that may be left for a later pass: about as much as a good pass leaves anyway."""

SLOWLY = 0.25
"""The same for residuals as they are: a pass finds less with them, so that columns saved are worth more. Over tolerances from
1e-3 to 1e-12 that saves `krylov` 6 to 8 % of its operations on dense rows; on sparse ones, where a column less saves less time,
and to directions that are sharper it brings nothing (measured)."""


def narrowed(spread: Spread, new: np.ndarray, directions: np.ndarray, ritz: Ritz, k: int, columns: Callable[[int], int],
             left_out: float = LEFT_OUT) -> np.ndarray:
    """An orthonormal basis of the part of ``new`` (d, m) that is worth a pass for the first ``k`` components.

    ``new`` is orthonormal and spans what ``directions`` (d, p) have outside of the subspace; ``columns`` says how many columns
    a pass takes that is asked for so many: only whole steps of it save anything; ``left_out`` of what there is to find may be
    left. 4 d m k operations.

    Communication
    -------------
    Collective where vectors are sliced: a sum of (m + 1) k numbers and a broadcast of m^2.
    """
    if len(ritz.values) <= k:
        return new
    some, m = directions[:, :k], new.shape[1]
    gaps = np.maximum(ritz.values[:k] - ritz.values[-1], 1e-3 * abs(ritz.values[-1]))
    if not (gaps > 0).all():
        return new
    products = spread.sum(np.concatenate([new.T @ some, np.einsum("ij,ij->j", some, some)[None]]))
    sizes = np.sqrt(products[m])
    weighted = products[:m] * (ritz.sizes[:k] / np.sqrt(gaps) / np.where(sizes > 0, sizes, 1))
    rotation, weights = spread.decided(lambda: np.linalg.svd(weighted)[:2])
    left = np.append(np.cumsum(weights[::-1] ** 2)[::-1], 0.0)
    fewest = int(np.argmax(left <= left_out * left[0]))
    width = columns(max(1, fewest))
    return new @ rotation[:, :width] if width < m else new
