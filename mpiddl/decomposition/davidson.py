"""The outer loop of all iterative solvers: a Rayleigh-Ritz method that keeps what it has paid for.

    V = an orthonormal start, A V by one pass
    repeat:  Ritz pairs (theta, W) of V^T A V;  residuals R = A W - W theta
             stop if the estimated error is small enough
             D = directions(theta, W, R), made orthogonal to V;  A D by one pass;  V = [V D]

What differs between solvers are the directions: `krylov` takes the residuals as they are (block Lanczos), `subsample` and
`vr` sharpen them. Whatever they are worth, explained variance never falls, for the old V stays in the space.

Cost: one pass and one all-reduce of d p numbers an iteration; a broadcast of the small eigenproblem's result and a comparison
of checksums, so that ranks whose processors round differently go on alike; memory 2 d m numbers for m columns of V, at
most ``most_columns`` of them: then V is cut down to its leading Ritz vectors.

References
----------
E. Davidson, J. Comput. Phys. 17, 1975, doi:10.1016/0021-9991(75)90065-0. R. Morgan, D. Scott, SIAM J. Sci. Stat. Comput. 7,
1986, doi:10.1137/0907054 (generalised). A. Stathopoulos, Y. Saad, K. Wu, SIAM J. Sci. Comput. 19, 1998,
doi:10.1137/S1064827596304162 (thick restarts).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from mpiddl.decomposition.orthogonal import orthonormal


class Ritz(NamedTuple):
    """Approximate eigenpairs, largest first, with the residuals A vectors - vectors values."""

    values: np.ndarray
    vectors: np.ndarray
    residuals: np.ndarray


Apply = Callable[[np.ndarray], np.ndarray]
Directions = Callable[[Ritz], np.ndarray]


def krylov(ritz: Ritz) -> np.ndarray:
    """The residuals: V then spans a block Krylov space."""
    return ritz.residuals


def davidson(comm: Any, apply: Apply, start: np.ndarray, directions: Directions, done: Callable[[Ritz], bool], *,
             most_columns: int | None = None) -> Ritz:
    """Leading eigenpairs of the symmetric ``apply``, as many as ``start`` has columns.

    ``done`` is asked after every pass, on every rank; what rank 0 says counts. It ends earlier where V spans all there is.
    """
    p = start.shape[1]
    most = most_columns or 8 * p
    basis = orthonormal(start)
    images = apply(basis)
    while True:
        projected = basis.T @ images
        values, rotation = comm.bcast(_descending(projected) if comm.rank == 0 else None)
        vectors = basis @ rotation[:, :p]
        ritz = Ritz(values[:p], vectors, images @ rotation[:, :p] - vectors * values[:p])
        if comm.bcast(done(ritz)):
            return ritz
        if basis.shape[1] + p > most:
            basis, images = basis @ rotation[:, : 2 * p], images @ rotation[:, : 2 * p]
        new = _same(comm, orthonormal(directions(ritz), basis))
        if not new.shape[1]:
            return ritz
        basis = np.concatenate([basis, new], axis=1)
        images = np.concatenate([images, apply(new)], axis=1)


def _same(comm: Any, block: np.ndarray) -> np.ndarray:
    """``block`` of every rank, if it is to the bit the same; else, where processors round differently, rank 0's.

    What is left of a direction after projections may be mostly rounding: a last bit's difference would grow with it.
    """
    if comm.size == 1 or len(set(comm.allgather((block.shape, crc32(block.tobytes()))))) == 1:
        return block
    return comm.bcast(block)


def _descending(projected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues and eigenvectors of a small symmetric matrix, largest first."""
    values, rotation = np.linalg.eigh((projected + projected.T) / 2)
    return values[::-1].copy(), rotation[:, ::-1].copy()
