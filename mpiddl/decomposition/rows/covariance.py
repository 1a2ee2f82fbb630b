"""The matrix whose leading eigenvectors are wanted, C = sum of s (x - mean) (x - mean)^T / sum of s, over all ranks' rows.

It is never formed: `Covariance.apply` is one pass over the rows and one all-reduce. The first pass also finds the mean, so that
centring costs no pass of its own: for y = x W - m W with any origin m,

    sum of s (x - mean) (x - mean)^T W = sum of s x y^T - mean (sum of s y)^T

because deviations from the mean add up to nothing. An origin near the mean keeps y small, and rounding with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from mpiddl.decomposition.rows.base import Rows
from mpiddl.decomposition.rows.column_split import Spread, Whole
from mpiddl.decomposition.rows.sums import allreduce
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm

LARGEST = 1e120
"""Of sums of squares: squares of them still have squares in float64."""


@dataclass
class Effort:
    """What a solver spent: passes over the rows (of all ranks), rounds of communication."""

    passes: float = 0.0
    rounds: int = 0


class Covariance:
    """The covariance of rows that are spread over ranks; without ``center``, their second moments X^T X / n.

    Attributes
    ----------
    mean : ndarray, shape (d,), float64
        Of the rows, complete after the first `apply` or after `measure`.
    variances : ndarray, shape (d,), float64
        Of the columns, likewise, whether or not C is centred.
    total : float
        Sum of all weights; without weights, the number of rows. Given, ``origin`` is the mean, and variances are not asked for.
    n : int
        Rows of all ranks, complete as the mean is.
    squares : ndarray, shape (n,)
        s |x - mean|^2 of this rank's rows, about, complete as the mean is.
    heaviness : float
        The largest of all ranks' squares over their average: how little rows are alike.
    origin : ndarray, shape (d,), float64
        What passes subtract: a guess at the mean until it is known, zero without ``center``.
    spread : Spread
        How the blocks that `apply` takes and gives lie on ranks; whole on each, if nothing is said.
    """

    def __init__(self, comm: Comm, rows: Rows, origin: np.ndarray, center: bool = True, effort: Effort | None = None,
                 total: float = 0.0, spread: Spread | None = None):
        self.comm, self.rows, self.center, self.spread = comm, rows, center, spread or Whole(comm, rows.d)
        self.effort = effort or Effort()
        self.origin = origin if center else np.zeros(rows.d)
        self.mean, self.variances = self.origin, np.zeros(rows.d)
        self.total, self.n, self.heaviness, self.squares = total, 0, np.inf, np.zeros(0)

    def apply(self, w: np.ndarray) -> np.ndarray:
        """C W for W of shape (d, k), float64; of both this rank has what `spread` says.

        Communication
        -------------
        Collective: one all-reduce of d k + k numbers in float64, or as many by a reduce-scatter and an all-gather; at the first
        time 2 d + 1 more, and an all-gather of two.
        """
        k, first = w.shape[1], self.total == 0.0
        found = self.rows.sums(self.spread.whole(w), self.origin, moments=first)
        sums = np.concatenate([found.shifts, found.moments.reshape(-1), np.full(int(first), self.rows.total)])
        product, sums = self.spread.reduced(found.product, sums)
        self.effort.passes += 1
        self.effort.rounds += 1
        if first:
            self.take_moments(sums[k:-1].reshape(2, -1), sums[-1])
            self.squares = found.squares
            own = self.rows.n, self.squares.max(initial=0.0), self.squares.sum()
            counts, largest, squares = zip(*self.comm.allgather(own), strict=True)
            self.n = sum(counts)
            self.heaviness = max(largest) * self.n / sum(squares) if sum(squares) > 0 else 1.0
        return self._about_mean(product, sums[:k])

    def apply_each(self, samples: Iterable[Covariance], w: np.ndarray) -> list[np.ndarray]:
        """What each of those that `estimated` gives makes of W, by one all-reduce of as many times d k + k numbers."""
        whole = self.spread.whole(w)
        products, shifts, _, _ = zip(*(sample.rows.sums(whole, self.origin) for sample in samples), strict=True)
        product, sums = self.spread.reduced(np.concatenate(products, axis=1), np.concatenate(shifts))
        found = zip(np.split(product, len(products), axis=1), np.split(sums, len(products)), strict=True)
        return [self._about_mean(np.ascontiguousarray(product), shift) for product, shift in found]

    def _about_mean(self, product: np.ndarray, shifts: np.ndarray) -> np.ndarray:
        """C W of sums over all ranks, in place; collective as `Spread.sum` is."""
        fine = product.min(initial=0.0) > -LARGEST and product.max(initial=0.0) < LARGEST  # not so of NaN
        if self.spread.sum(np.array([0.0 if fine else 1.0])).any():
            raise NotFinite
        if self.center:
            product -= np.outer(self.spread.own(self.mean), shifts)
        product /= self.total
        return product

    def estimated(self, count: int, seed: int, parts: int = 1) -> Iterator[Covariance]:
        """The same estimated from ``count`` rows of all ranks, about the mean that passes have found; so often, each time from
        rows of its own.

        Rows are drawn with probabilities that go with their squares, and weighted by the inverse: by how much the estimate
        is wrong then depends on trace / (lambda ``count``) only, not on how long some rows are (J. Tropp, Found. Trends Mach.
        Learn. 8, 2015, doi:10.1561/2200000048, section 6.4).

        Communication
        -------------
        Collective: an all-gather of a number, when the first is asked for.
        """
        sums = np.array(self.comm.allgather(self.squares.sum()))
        likely = sums / (sums.sum() or 1.0)
        counts = np.random.default_rng([seed, 0]).multinomial(count if sums.any() else 0, likely, parts)[:, self.comm.rank]
        random = np.random.default_rng([seed, 1, self.comm.rank])
        ladder = np.cumsum(self.squares)
        for own in counts:
            reached = ladder[-1:].sum()  # nothing is drawn where there is nothing
            chosen = np.sort(np.searchsorted(ladder, random.random(own if reached else 0) * reached))
            some = self.rows.take(chosen)
            given = some.weights if some.weights.size else np.ones(some.n, some.dtype)
            some.weights = (given * (sums.sum() / (count * self.squares[chosen]))).astype(some.dtype)
            yield Covariance(self.comm, some, self.mean, self.center, total=self.total, spread=self.spread)

    def measure(self) -> None:
        """Mean, variance and total by a pass of their own, where `apply` will not be called.

        Communication
        -------------
        Collective: one all-reduce of 2 d + 1 numbers.
        """
        found = self.rows.sums(np.zeros((self.rows.d, 1)), self.origin, moments=True)
        message = np.append(found.moments.reshape(-1), self.rows.total)
        allreduce(self.comm, IN_PLACE, message)
        self.effort.rounds += 1
        self.take_moments(message[:-1].reshape(2, -1), message[-1])

    def take_moments(self, moments: np.ndarray, total: float) -> None:
        """From the sums of s (x - origin) and of s (x - origin)^2 over all ranks, and of s."""
        if not np.abs(moments).max(initial=0.0) < LARGEST:
            raise NotFinite
        self.total = total
        if total <= 0:
            return
        first, second = moments / total
        self.mean = self.origin + first
        self.variances = np.maximum(second - first**2, 0.0)
        if self.center:
            self.origin = self.mean

    @property
    def trace(self) -> float:
        """Of C."""
        return float(self.variances.sum() + (0.0 if self.center else (self.mean**2).sum()))


class NotFinite(Exception):
    """Some rank has rows that are not finite; raised on all of them."""
