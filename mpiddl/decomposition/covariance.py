"""The matrix whose leading eigenvectors are wanted, C = sum of s (x - mean) (x - mean)^T / sum of s, over all ranks' rows.

It is never formed: `Covariance.apply` is one pass over the rows and one all-reduce. The first pass also finds the mean, so that
centring costs no pass of its own: for y = x W - m W with any origin m,

    sum of s (x - mean) (x - mean)^T W = sum of s x y^T - mean (sum of s y)^T

because deviations from the mean add up to nothing. An origin near the mean keeps y small, and rounding with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.collectives import allreduce
from mpiddl.decomposition.rows import Rows
from mpiddl.transport.base import IN_PLACE


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
    heaviness : float
        The largest s |x - mean|^2 over its average, about, complete as the mean is: how little rows are alike.
    origin : ndarray, shape (d,), float64
        What passes subtract: a guess at the mean until it is known, zero without ``center``.
    """

    def __init__(self, comm: Any, rows: Rows, origin: np.ndarray, center: bool = True, effort: Effort | None = None,
                 total: float = 0.0):
        self.comm, self.rows, self.center = comm, rows, center
        self.effort = effort or Effort()
        self.origin = origin if center else np.zeros(rows.d)
        self.mean, self.variances = self.origin, np.zeros(rows.d)
        self.total, self.heaviness, self._heaviest = total, np.inf, (0, 0)

    def apply(self, w: np.ndarray) -> np.ndarray:
        """C W for W of shape (d, k), float64.

        Communication
        -------------
        Collective: one all-reduce of d k + k numbers in float64; at the first time 2 d + 1 more, and an all-gather of two.
        """
        d, k = w.shape
        first = self.total == 0.0
        found = self.rows.sums(w, self.origin, moments=first)
        message = np.empty(d * k + k + (2 * d + 1 if first else 0))
        message[: d * k] = found.product.reshape(-1)
        message[d * k : d * k + k] = found.shifts
        if first:
            message[d * k + k : -1] = found.moments.reshape(-1)
            message[-1] = self.rows.total
        allreduce(self.comm, IN_PLACE, message)
        self.effort.passes += 1
        self.effort.rounds += 1
        if first:
            moments = message[d * k + k : -1].reshape(2, d)
            n, largest, row = zip(*self.comm.allgather((self.rows.n, *found.largest)), strict=True)
            square, rank = moments[1].sum(), int(np.argmax(largest))
            self.heaviness = largest[rank] * sum(n) / square if square > 0 else 1.0
            self._heaviest = rank, int(row[rank])
            self.take_moments(moments, message[-1])
        product = message[: d * k].reshape(d, k)
        if self.center:
            product -= np.outer(self.mean, message[d * k : d * k + k])
        product /= self.total
        return product

    def estimated(self, rows: Rows) -> Covariance:
        """The same estimated from some rows of all ranks, about the mean that passes have found.

        Communication
        -------------
        Collective: an all-gather of a number.
        """
        return Covariance(self.comm, rows, self.mean, self.center, total=sum(self.comm.allgather(rows.total)))

    def heaviest(self) -> np.ndarray:
        """The row of that length less the mean, (d,).

        Communication
        -------------
        Collective: one rank's d numbers to all.
        """
        rank, number = self._heaviest
        own = next(iter(self.rows.take(np.array([number])).blocks(1)))[0][0] if self.comm.rank == rank else None
        return self.comm.allgather(own)[rank].astype(np.float64) - self.mean * self.center

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
        if not np.isfinite(moments).all():
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
