"""A sample of the rows of all ranks, on which solvers warm up for a fraction of a pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpiddl.collectives import allreduce
from mpiddl.decomposition.covariance import Covariance, Effort, NotFinite
from mpiddl.decomposition.davidson import Ritz, davidson, krylov
from mpiddl.decomposition.rows import Rows, centred_blocks
from mpiddl.transport.base import IN_PLACE

WARM_PASSES = 6
"""Of block Lanczos on the sample: its leading Ritz vectors are then nearer to the sample's than those to the truth."""


class Sample(NamedTuple):
    """This rank's part of a sample, and the sample's mean on all ranks; ``share`` of all rows are in it."""

    rows: Rows
    mean: np.ndarray
    share: float


def draw(comm: Any, rows: Rows, n: int, most: int, seed: int, effort: Effort) -> Sample:
    """About ``most`` of all ranks' ``n`` rows at random, from each rank in proportion to what it has; all if they are fewer.

    Communication
    -------------
    Collective: one all-reduce of d + 1 numbers.
    """
    share = min(1.0, most / max(1, n))
    taken = rows.take(_strata(rows.n, round(share * rows.n), np.random.default_rng([seed, comm.rank, 1])))
    message = np.append(taken.weighted_sum(), taken.total)
    allreduce(comm, IN_PLACE, message)
    effort.rounds += 1
    if not np.isfinite(message).all():
        raise NotFinite
    return Sample(taken, message[:-1] / message[-1] if message[-1] > 0 else message[:-1], share)


def _strata(n: int, wanted: int, random: np.random.Generator) -> np.ndarray:
    """``wanted`` of ``n`` row numbers, ascending: one at random from each of so many equal parts."""
    edges = np.arange(wanted + 1) * n // max(1, wanted)
    return edges[:-1] + (random.random(wanted) * np.diff(edges)).astype(np.int64)


def covariance(comm: Any, sample: Sample, center: bool, effort: Effort) -> np.ndarray:
    """The sample's covariance, shape (d, d), float32.

    Communication
    -------------
    Collective: an all-reduce of d^2 + 1 numbers in float32.
    """
    rows, d = sample.rows, sample.rows.d
    message = np.zeros(d * d + 1, np.float32)
    origin = sample.mean if center else np.zeros(d)
    products = message[: d * d].reshape(d, d)
    for moved, _ in centred_blocks(rows, origin, np.dtype(np.float32)):
        products += moved.T @ moved
    message[-1] = rows.total
    allreduce(comm, IN_PLACE, message)
    effort.passes += sample.share
    effort.rounds += 1
    products /= message[-1]
    return products


def warm_start(comm: Any, sample: Sample, columns: int, center: bool, seed: int, effort: Effort) -> Ritz:
    """Leading Ritz pairs of the sample, without forming its covariance: (d, ``columns``).

    Communication
    -------------
    Collective: an all-reduce of d ``columns`` numbers for each of a few passes over the sample.
    """
    spent = Effort()
    operator = Covariance(comm, sample.rows, sample.mean, center, spent)
    result = _lanczos(comm, operator.apply, sample.rows.d, columns, seed)
    effort.passes += spent.passes * sample.share
    effort.rounds += spent.rounds
    return result


def warm_start_of(comm: Any, products: np.ndarray, columns: int, seed: int) -> Ritz:
    """The same from the sample's covariance: no communication but the small one of `davidson`."""
    def apply(w: np.ndarray) -> np.ndarray:
        return (products @ w.astype(np.float32)).astype(np.float64)

    return _lanczos(comm, apply, len(products), columns, seed)


def _lanczos(comm: Any, apply: Any, d: int, columns: int, seed: int) -> Ritz:
    start = np.random.default_rng([seed, 0]).standard_normal((d, columns))
    passes = iter(range(1, WARM_PASSES))
    return davidson(comm, apply, start, krylov, lambda ritz: next(passes, None) is None)
