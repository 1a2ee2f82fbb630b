"""The outer loop of all iterative solvers: a Rayleigh-Ritz method that keeps what it has paid for.

    V = an orthonormal start, A V by one pass
    repeat:  Ritz pairs (theta, W) of V^T A V;  residuals R = A W - W theta
             stop if the estimated error is small enough
             D = directions(theta, W, R), made orthogonal to V
             A D from a sample;  stop if the estimated error with V = [V D] is then small enough
             A D by one pass, D being cut down to the columns worth it (`narrowing`);  V = [V D]

What differs between solvers are the directions: `krylov` takes the residuals as they are (block Lanczos), `subsample` and
`vr` sharpen them. Whatever they are worth, explained variance never falls, for the old V stays in the space.

The last pass is saved by a look at a sample of the rows, drawn for that alone. What A D has along V is known, (A V)^T D; the
rest is estimated, and what is wrong with it appears in the residuals, but for what lies in the span of D: they are scaled
up for that, as if errors were like variances; and in the values, by as much as two halves of the sample differ. Where that is
nearly good enough, a larger sample is looked at.

Cost: one pass and one all-reduce of d p numbers an iteration; a broadcast of the small eigenproblem's result and a comparison
of checksums, so that ranks whose processors round differently go on alike; memory 2 d m numbers for m columns of V, at
most ``most_columns`` of them: then V is cut down to its leading Ritz vectors. Where vectors are sliced (`spread`), what is
done with them, and their memory, is shared among ranks, for sums of a few p m numbers in place of the comparison.

References
----------
E. Davidson, J. Comput. Phys. 17, 1975, doi:10.1016/0021-9991(75)90065-0. R. Morgan, D. Scott, SIAM J. Sci. Stat. Comput. 7,
1986, doi:10.1137/0907054 (generalised). A. Stathopoulos, Y. Saad, K. Wu, SIAM J. Sci. Comput. 19, 1998,
doi:10.1137/S1064827596304162 (thick restarts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from mpiddl.decomposition.rows.column_split import Spread
from mpiddl.decomposition.solvers.orthogonal import orthonormal
from mpiddl.decomposition.solvers.subspace import Ritz, Subspace

Apply = Callable[[np.ndarray], np.ndarray]
Done = Callable[[Ritz], bool]


class Look(Protocol):
    """A look at a sample before a pass."""

    @property
    def trace(self) -> float:
        """Of the matrix."""

    def worth(self, ritz: Ritz) -> bool:
        """Whether it may well save the pass; what rank 0 says counts."""

    def __call__(self, block: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """An estimate of the product, and another estimate of how wrong it is; then better ones, for more."""

    def convinced(self, ritz: Ritz) -> bool:
        """Whether that suffices; what rank 0 says counts."""

    def nearly(self, ritz: Ritz) -> bool:
        """Whether a better estimate may well suffice, where this one does not; what rank 0 says counts."""


Directions = Callable[[Ritz], np.ndarray]
Narrow = Callable[[np.ndarray, np.ndarray, Ritz], np.ndarray]


def krylov(ritz: Ritz) -> np.ndarray:
    """The residuals: V then spans a block Krylov space."""
    return ritz.residuals


def davidson(spread: Spread, apply: Apply, start: np.ndarray, directions: Directions, done: Done, *,
             look: Look | None = None, narrow: Narrow | None = None, most_columns: int | None = None) -> Ritz:
    """Leading eigenpairs of the symmetric ``apply``, as many as ``start`` has columns; all blocks lie as ``spread`` says.

    ``done`` is asked after every pass, on every rank; what rank 0 says counts. It ends earlier where V spans all there is.
    """
    comm, p = spread.comm, start.shape[1]
    space, new = Subspace(spread, most_columns or 8 * p), spread.same(orthonormal(spread, start))
    while True:
        space.extend(new, apply(new))
        ritz = space.ritz(p)
        if comm.bcast(done(ritz)):
            return ritz
        space.make_room(p, 2 * p)
        wanted = directions(ritz)
        new = spread.same(orthonormal(spread, wanted, space.basis))
        if not new.shape[1]:
            return ritz
        if look is not None and comm.bcast(look.worth(ritz)):
            for images, doubt in look(new):
                last = _with_sample(space, new, images, doubt, look.trace, p)
                if comm.bcast(look.convinced(last)):
                    return last
                space.drop(new.shape[1])
                if not comm.bcast(look.nearly(last)):
                    break
        if narrow is not None:
            new = spread.same(narrow(new, wanted, ritz))


def _with_sample(space: Subspace, new: np.ndarray, images: np.ndarray, doubt: np.ndarray, trace: float, p: int) -> Ritz:
    """Ritz pairs of a space that takes in ``new`` with what a sample makes of it; ``trace`` is that of the matrix."""
    outside = max(trace - space.trace, 0.0)
    space.extend(new, images, sampled=True)
    seen, ritz = trace - space.trace, space.ritz(p)
    share, more = space.weights(new.shape[1], p), outside / max(seen, 1e-9 * outside, np.finfo(float).tiny)
    wrong = np.einsum("ij,ij->j", share, space.spread.sum(new.T @ doubt) @ share)
    return ritz._replace(residuals=ritz.residuals * np.sqrt(more), products=ritz.products * more, doubt=2 * np.abs(wrong))


def lanczos(spread: Spread, apply: Apply, start: np.ndarray, passes: int) -> np.ndarray:
    """Leading Ritz vectors of the block Krylov space of so many passes: what `davidson` does with `krylov`, asked once."""
    space, new = Subspace(spread, passes * start.shape[1]), spread.same(orthonormal(spread, start))
    while True:
        image = apply(new)
        along = space.extend(new, image)
        passes -= 1
        new = spread.same(orthonormal(spread, image, space.basis, along)) if passes else new[:, :0]
        if not new.shape[1]:
            return space.leading(start.shape[1])[1]
