"""Directions by variance-reduced SGD: every rank takes mini-batch steps on its own rows, then the ranks' blocks are averaged.

VR-PCA (Shamir) steps from W~ by  W <- W + eta (C_b (W - W~) + C W~), C_b being the covariance of a mini-batch. Here in
correction form: with D = W - W~ orthogonal to the Ritz basis W~ and R = C W~ - W~ theta, known from the outer loop,

    D <- D + eta ((C_b - theta) D + R)

needs no orthonormalisation a step, loses no digits in float32, and D of different ranks can be averaged as they are. The
outer loop then takes the best of {W~, D, what went before}, so a step too long costs time, never accuracy.

Cost of one call: `fraction` of a pass; an all-reduce of d p numbers for every `sync_every` steps, at the end at least, started
and applied `sync_delay` blocks later (delayed synchronisation: the ranks go on meanwhile).

References
----------
O. Shamir, ICML 2015, arXiv:1409.2848, algorithm 1; ICML 2016, arXiv:1507.08788. Correction form, step size and delayed
averaging: ours, derived in docs/decomposition.md.
"""

from __future__ import annotations

from itertools import pairwise, repeat
from math import ceil, sqrt
from typing import Any

import numpy as np

from mpiddl import kernels
from mpiddl.collectives import iallreduce
from mpiddl.decomposition.rows.base import padded
from mpiddl.decomposition.rows.covariance import Covariance, Effort
from mpiddl.decomposition.rows.dense import DenseRows
from mpiddl.decomposition.rows.files import FileRows
from mpiddl.decomposition.solvers.base import Task
from mpiddl.decomposition.solvers.davidson import Directions, davidson
from mpiddl.decomposition.solvers.error_estimates import missed_variance
from mpiddl.decomposition.solvers.iterative import Iterative
from mpiddl.decomposition.solvers.sample import Sample, draw
from mpiddl.decomposition.solvers.settings import Settings
from mpiddl.decomposition.solvers.subspace import Ritz
from mpiddl.transport.base import IN_PLACE

ORTHOGONAL_EVERY = 4

MOST_SNAPSHOTS = 10
"""Anchors from a part of the rows; where more are needed a gap is so small that a part will not tell."""


class VarianceReduced:
    """Directions for `davidson`, from the rows under ``covariance``."""

    def __init__(self, covariance: Covariance, settings: Settings, seed: int):
        assert isinstance(covariance.rows, (DenseRows, FileRows))  # `solve` has refused others
        self._covariance, self._rows, self._settings = covariance, covariance.rows, settings
        # Ranks with the same seed would walk the same path, for nothing.
        self._random = np.random.default_rng([seed, covariance.comm.rank])

    def __call__(self, ritz: Ritz) -> np.ndarray:
        """D (d, p)."""
        rows, settings, step = self._rows, self._settings, kernels.correction_steps.correction_steps
        d, p = ritz.vectors.shape
        k = rows.columns(p)
        scale = max(ritz.sizes.max(), np.finfo(float).tiny)
        given = ritz.residuals / scale, ritz.vectors, ritz.values[None]
        residual, w, values = (padded(part, k, rows.dtype) for part in given)
        batch, steps, rate = self._lengths(float(ritz.values[0]))
        block = np.zeros((d, k), rows.dtype)
        scratch, sums = np.empty(kernels.correction_steps.steps_scratch(d, k), rows.dtype), np.zeros(k)
        mean = (self._covariance.mean * self._covariance.center).astype(rows.dtype)
        averages: list[tuple[Any, np.ndarray, np.ndarray]] = []
        every = settings.sync_every or steps
        unit = kernels.normal_product.BLOCK
        groups = self._random.integers(0, max(1, -(-rows.n // unit)), (steps, batch // unit)) * unit
        at_once = rows.steps_at_once(batch) if rows.n else steps
        ends = sorted({*range(0, steps, every), *range(0, steps, at_once), steps})
        spans = list(pairwise(ends))
        gathered = rows.gathered(groups[begin:end] for begin, end in spans) if rows.n else repeat(None)
        for (_, end), found in zip(spans, gathered, strict=bool(rows.n)):
            if found is not None:
                x, weights, places = found
                step(x, weights, mean, places, rate, values[0], residual, w, ORTHOGONAL_EVERY, block, sums, scratch)
            if end < steps and end % every == 0:
                averages.append(self._start(block))
                if len(averages) > settings.sync_delay:
                    self._apply(block, averages.pop(0))
        for average in averages:
            self._apply(block, average)
        request, result, _ = self._start(block)  # to the bit the same on all ranks, which an average applied late is not
        request.Wait()
        self._covariance.effort.passes += settings.fraction
        return result[:, :p]

    def _lengths(self, largest: float) -> tuple[int, int, float]:
        """Rows of a batch, steps, step size: the same on every rank."""
        covariance, settings = self._covariance, self._settings
        ranks, total = covariance.comm.size, covariance.n
        mine = total / ranks
        stiffness = covariance.trace / largest
        batch = settings.batch or min(mine / 16, sqrt(mine * stiffness) / 2)
        unit = kernels.normal_product.BLOCK
        batch = max(unit, int(batch) // unit * unit)
        steps = max(2, int(settings.fraction * mine / batch))
        # 1/P of the steps a rank, P times as long (the law of averaging), as far as a mini-batch's own covariance, whose
        # largest eigenvalue is about (sqrt(lambda_1) + sqrt(trace / b))^2, leaves that stable.
        rate = settings.step * ranks * batch / sqrt(total * largest * covariance.trace)
        return batch, steps, min(rate, 0.9 / (sqrt(largest) + sqrt(covariance.trace / batch)) ** 2)

    def _start(self, block: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
        """Start the average over ranks, each with the weight of its rows."""
        covariance = self._covariance
        mine = block.astype(np.float64)
        mean = mine * (covariance.rows.total / covariance.total)
        covariance.effort.rounds += 1
        return iallreduce(covariance.comm, IN_PLACE, mean), mean, mine

    def _apply(self, block: np.ndarray, average: tuple[Any, np.ndarray, np.ndarray]) -> None:
        """What the others had found by then, in place of what we had."""
        request, mean, mine = average
        request.Wait()
        block += (mean - mine).astype(block.dtype)


class VarianceReducedSolver(Iterative):
    """`Iterative` with directions by variance-reduced SGD."""

    sparse = False
    compiled = True

    def begin(self, task: Task, operator: Covariance, sample: Sample, most: int) -> tuple[np.ndarray, Directions]:
        start = self.warm_start(task, operator, sample)
        if task.vr.snapshot < 1:
            start = _from_snapshots(task, min(most, ceil(task.vr.snapshot * task.n)), start)
        return start, VarianceReduced(operator, task.vr, task.seed)


def _from_snapshots(task: Task, count: int, start: np.ndarray) -> np.ndarray:
    """Iterate with anchors from ``count`` rows, until what they miss of their own components is less than these miss of the
    truth: about trace / (theta_1 count) of the explained variance."""
    spent = Effort()
    sample = draw(task.comm, task.rows, task.n, count, task.seed + 1, task.effort)
    operator = Covariance(task.comm, sample.rows, sample.mean, task.center, spent)

    def enough(ritz: Ritz) -> bool:
        values = ritz.values[: task.k]
        noise = operator.trace / max(values[0], np.finfo(float).tiny) / count
        return missed_variance(ritz, task.k).sum() <= noise * values.sum() or spent.passes >= MOST_SNAPSHOTS

    found = davidson(operator.spread, operator.apply, start, VarianceReduced(operator, task.vr, task.seed + 1), enough)
    task.effort.passes += spent.passes * sample.share
    task.effort.rounds += spent.rounds
    return found.vectors
