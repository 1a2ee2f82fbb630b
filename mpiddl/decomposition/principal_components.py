"""Principal components: what is wanted of the covariance of centred rows, and what is known of them afterwards."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from mpiddl.decomposition.base import Decomposition, counted, variances_in
from mpiddl.decomposition.rows_of_all import OWN
from mpiddl.decomposition.solve import Result
from mpiddl.errors import UsageError
from mpiddl.transport.comm import AnyComm


class PrincipalComponents(Decomposition):
    """`PCA` without scikit-learn: the same parameters and attributes, of rows that solvers take as they are."""

    def __init__(self, n_components: int | float | None = None, *, whiten: bool = False, solver: str = "auto",
                 tol: float = 1e-8, random_state: Any = None, comm: AnyComm | None = None, threads: int = 0,
                 vr_fraction: float = 0.125, batch_size: int | None = None, step_size: float = 1.0,
                 sync_every: int | None = None, sync_delay: int = 0, snapshot_fraction: float = 1.0,
                 max_passes: float = 200, rows: str = OWN):
        super().__init__(n_components, solver, tol, random_state, comm, threads, vr_fraction, batch_size, step_size, sync_every,
                         sync_delay, snapshot_fraction, max_passes)
        self.rows = rows
        self.whiten = whiten

    def _wanted(self, n: int, d: int) -> int | float:
        """Components wanted of ``n`` rows, or the share of variance."""
        wanted, least = self.n_components, min(n, d)
        if n < 2:
            raise UsageError(f"n_samples={n}: expected more than 1 sample, because a variance needs two rows")
        if wanted is None:
            return least
        if isinstance(wanted, Integral) and not isinstance(wanted, bool) and 1 <= int(wanted) <= least:
            return int(wanted)
        if isinstance(wanted, (float, np.floating)) and 0 < wanted < 1:
            return float(wanted)
        raise UsageError(f"n_components: got {wanted!r}, expected a whole number from 1 to {least}, the smaller of n_samples "
                         "and n_features, or a share of the variance between 0 and 1")

    def _check_total(self, total: float) -> None:
        if total < 2:
            raise UsageError(f"sample_weight: got weights with a sum of {total:g}, expected a sum of 2 or more, "
                             "because a weight is the number of times that its row is counted")

    def _take(self, result: Result, dtype: np.dtype) -> None:
        self._remember(result, dtype)
        unbiased, k = result.total / (result.total - 1), len(result.values)
        least = min(counted(result.n, result.total), self.n_features_in_)
        variance = result.variances.sum() * unbiased
        explained = result.values * unbiased
        self.mean_ = result.mean.astype(dtype)
        self.explained_variance_ = variances_in(dtype, explained, result.unit)
        self.explained_variance_error_ = (
            result.errors * unbiased * result.unit * result.unit).astype(self.explained_variance_.dtype)
        self.explained_variance_ratio_ = (explained / variance if variance > 0 else np.zeros(k)).astype(dtype)
        noise = max(variance - explained.sum(), 0.0) / (least - k) if k < least else 0.0
        self.noise_variance_ = float(noise * result.unit * result.unit)

    def _scores(self, x: np.ndarray) -> np.ndarray:
        scores = x @ self.components_.T - (self.mean_ @ self.components_.T)
        return scores / self._deviations() if self.whiten else scores

    def _rows_from(self, scores: np.ndarray) -> np.ndarray:
        return (scores * self._deviations() if self.whiten else scores) @ self.components_ + self.mean_

    def _deviations(self) -> np.ndarray:
        """Of the scores; those of constant ones are as good as 0, and dividing by them must not give infinity."""
        deviations = np.sqrt(self.explained_variance_).astype(self.components_.dtype)
        return np.maximum(deviations, np.finfo(deviations.dtype).eps)
