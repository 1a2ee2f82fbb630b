"""A sample of the rows of all ranks, on which solvers warm up for a fraction of a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from mpiddl.decomposition.rows.base import Rows, centred_blocks
from mpiddl.decomposition.rows.column_split import Spread, Whole
from mpiddl.decomposition.rows.covariance import Covariance, Effort, NotFinite
from mpiddl.decomposition.rows.sums import allreduce
from mpiddl.decomposition.solvers.davidson import Apply, lanczos
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm

CLOSER = 2
"""Times as many rows for a closer look."""

WARM_PASSES = 4
"""Of block Lanczos on the sample: its leading Ritz vectors are then nearer to the sample's than those to the truth."""


class Sample(NamedTuple):
    """This rank's part of a sample, and the sample's mean and weight on all ranks; ``share`` of all rows are in it."""

    rows: Rows
    mean: np.ndarray
    total: float
    share: float


def most_taken(comm: Comm, rows: Rows) -> int:
    """Rows of all ranks that a sample should have at most: no rank has to take more than it should.

    Communication
    -------------
    Collective: an all-gather of two numbers.
    """
    limits = comm.allgather((rows.n, rows.most_taken))
    n = sum(own for own, _ in limits)
    return min([n, *(most * n // own for own, most in limits if own)])


def draw(comm: Comm, rows: Rows, n: int, most: int, seed: int, effort: Effort) -> Sample:
    """About ``most`` of all ranks' ``n`` rows at random, from each rank in proportion to what it has; all if they are fewer.

    Communication
    -------------
    Collective: one all-reduce of d + 1 numbers.
    """
    share = min(1.0, most / max(1, n))
    taken = rows.take(strata(rows.n, round(share * rows.n), np.random.default_rng([seed, comm.rank, 1])))
    message = np.append(taken.weighted_sum(), taken.total)
    allreduce(comm, IN_PLACE, message)
    effort.rounds += 1
    if not np.isfinite(message).all():
        raise NotFinite
    return Sample(taken, message[:-1] / message[-1] if message[-1] > 0 else message[:-1], message[-1], share)


class HeldOut:
    """C W from ``count`` rows that are drawn when it is first called, whatever other samples hold: the mean of what two halves
    of them say, and half of the difference; then the same from `CLOSER` times as many more, which are not kept.

    Communication
    -------------
    Each time as a pass with twice the columns; an all-gather of a number besides, but where rows are kept.
    """

    def __init__(self, covariance: Covariance, n: int, most: int, columns: int, seed: int):
        self.count, self._n, self._seed = min(most, max(n // 32, 8 * columns, 1024)), n, seed
        self._covariance = covariance
        self._halves: list[Covariance] = []

    def __call__(self, w: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        half = self.count // 2
        self._halves = self._halves or list(self._covariance.estimated(half, self._seed + 2, parts=2))
        one, other = self._products(self._halves, w, self.count)
        yield (one + other) / 2, (one - other) / 2
        count = min(CLOSER * self.count, self._n - self.count)
        if count < self.count:
            return
        closer = self._products(self._covariance.estimated(count // 2, self._seed + 6, parts=2), w, count)
        share = count / (self.count + count)
        one, other = (first + share * (more - first) for first, more in zip((one, other), closer, strict=True))
        yield (one + other) / 2, (one - other) / 2

    def _products(self, halves: Iterable[Covariance], w: np.ndarray, count: int) -> list[np.ndarray]:
        self._covariance.effort.passes += count / self._n
        self._covariance.effort.rounds += 1
        return self._covariance.apply_each(halves, w)


def second_start(covariance: Covariance, n: int, count: int, columns: int, seed: int) -> np.ndarray:
    """What `warm_start` finds, ``columns`` vectors, from rows drawn by their lengths: where a plain sample tells little.

    Communication
    -------------
    As `warm_start`.
    """
    (sample,) = covariance.estimated(count, seed + 4)
    found = _warm(covariance.spread, sample.apply, columns, seed + 4)
    covariance.effort.passes += WARM_PASSES * count / n
    covariance.effort.rounds += WARM_PASSES
    return found


def strata(n: int, wanted: int, random: np.random.Generator) -> np.ndarray:
    """``wanted`` of ``n`` row numbers, ascending: one at random from each of so many equal parts."""
    edges = np.arange(wanted + 1) * n // max(1, wanted)
    return edges[:-1] + (random.random(wanted) * np.diff(edges)).astype(np.int64)


def covariance(comm: Comm, sample: Sample, center: bool, effort: Effort) -> np.ndarray:
    """The sample's covariance, shape (d, d), float32, in which it may overflow.

    Communication
    -------------
    Collective: an all-reduce of d^2 + 1 numbers in float32.
    """
    rows, d = sample.rows, sample.rows.d
    message = np.zeros(d * d + 1, np.float32)
    origin = sample.mean if center else np.zeros(d)
    products = message[: d * d].reshape(d, d)
    with np.errstate(over="ignore", invalid="ignore"):
        for moved, _ in centred_blocks(rows, origin, np.dtype(np.float32)):
            products += moved.T @ moved
    message[-1] = rows.total
    allreduce(comm, IN_PLACE, message)
    effort.passes += sample.share
    effort.rounds += 1
    products /= message[-1]
    return products


def warm_start(spread: Spread, sample: Sample, columns: int, center: bool, seed: int, effort: Effort) -> np.ndarray:
    """Leading Ritz vectors of the sample, ``columns`` of them, without forming its covariance; they lie as ``spread`` says.

    Communication
    -------------
    Collective: an all-reduce of d ``columns`` numbers for each of a few passes over the sample.
    """
    spent = Effort()
    operator = Covariance(spread.comm, sample.rows, sample.mean, center, spent, sample.total, spread)
    result = _warm(spread, operator.apply, columns, seed)
    effort.passes += spent.passes * sample.share
    effort.rounds += spent.rounds
    return result


def warm_start_of(comm: Comm, products: np.ndarray, columns: int, seed: int) -> np.ndarray:
    """The same from the sample's covariance: no communication but the small one of `davidson`."""
    def apply(w: np.ndarray) -> np.ndarray:
        return (products @ w.astype(np.float32)).astype(np.float64)

    return _warm(Whole(comm, len(products)), apply, columns, seed)


def _warm(spread: Spread, apply: Apply, columns: int, seed: int) -> np.ndarray:
    return lanczos(spread, apply, spread.random(columns, seed), WARM_PASSES)
