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

from dataclasses import dataclass
from itertools import pairwise, repeat
from math import sqrt
from numbers import Integral, Real
from typing import Any

import numpy as np

from mpiddl import kernels
from mpiddl.collectives import iallreduce
from mpiddl.decomposition.rows.base import padded
from mpiddl.decomposition.rows.covariance import Covariance
from mpiddl.decomposition.rows.dense import DenseRows
from mpiddl.decomposition.rows.files import FileRows
from mpiddl.decomposition.solvers.subspace import Ritz
from mpiddl.errors import UsageError
from mpiddl.transport.base import IN_PLACE

ORTHOGONAL_EVERY = 4


@dataclass(frozen=True)
class Settings:
    """Options of the solver ``vr``. None means that the value is chosen from the data.

    Attributes
    ----------
    fraction : float
        Share of the rows of a rank that the mini-batches between two snapshots use.
    batch : int or None
        Rows in a mini-batch.
    step : float
        Factor of the automatic step size.
    sync_every : int or None
        Steps between two averages over the ranks. None means one average at the end.
    sync_delay : int
        Number of averages by which each average is delayed.
    snapshot : float
        Share of the rows that a snapshot (W~ and R) is computed from. Later snapshots use all rows.
    """

    fraction: float = 0.125
    batch: int | None = None
    step: float = 1.0
    sync_every: int | None = None
    sync_delay: int = 0
    snapshot: float = 1.0

    def check(self) -> None:
        """Raise a `UsageError` for what makes no sense."""
        whole = {"batch_size": (self.batch, 1), "sync_every": (self.sync_every, 1), "sync_delay": (self.sync_delay, 0)}
        for name, (value, least) in whole.items():
            if value is None and name != "sync_delay":
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise UsageError(f"{name}: got {value!r}, expected a whole number from {least}")
        if not isinstance(self.snapshot, Real) or isinstance(self.snapshot, bool) or not 0 < self.snapshot <= 1:
            raise UsageError(f"snapshot_fraction: got {self.snapshot!r}, expected a number above 0 and at most 1")
        for name, number in {"vr_fraction": self.fraction, "step_size": self.step}.items():
            if isinstance(number, bool) or not isinstance(number, Real) or not 0 < number < float("inf"):
                raise UsageError(f"{name}: got {number!r}, expected a number above 0")


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
