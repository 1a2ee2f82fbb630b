"""Singular vectors: what is wanted of the second moments of rows, and what is known of them afterwards."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from mpiddl.decomposition.base import Decomposition, variances_in
from mpiddl.decomposition.rows_of_all import OWN
from mpiddl.decomposition.solve import Result
from mpiddl.errors import UsageError
from mpiddl.transport.comm import AnyComm


class SingularVectors(Decomposition):
    """`TruncatedSVD` without scikit-learn: the same parameters and attributes, of rows that solvers take as they are."""

    _center = False

    def __init__(self, n_components: int = 2, *, solver: str = "auto", tol: float = 1e-8, random_state: Any = None,
                 comm: AnyComm | None = None, threads: int = 0, vr_fraction: float = 0.125, batch_size: int | None = None,
                 step_size: float = 1.0, sync_every: int | None = None, sync_delay: int = 0,
                 snapshot_fraction: float = 1.0, max_passes: float = 200, rows: str = OWN):
        super().__init__(n_components, solver, tol, random_state, comm, threads, vr_fraction, batch_size, step_size, sync_every,
                         sync_delay, snapshot_fraction, max_passes)
        self.rows = rows

    def _wanted(self, n: int, d: int) -> int | float:
        """Components wanted of ``n`` rows."""
        wanted, least = self.n_components, min(n, d)
        if isinstance(wanted, Integral) and not isinstance(wanted, bool) and 1 <= int(wanted) <= least:
            return int(wanted)
        raise UsageError(f"n_components: got {wanted!r}, expected a whole number from 1 to {least}, the smaller of "
                         "n_samples and n_features")

    def _take(self, result: Result, dtype: np.dtype) -> None:
        self._remember(result, dtype)
        explained = np.maximum(result.values - (result.components @ result.mean / result.unit) ** 2, 0.0)
        variance = result.variances.sum()
        self.explained_variance_ = variances_in(dtype, explained, result.unit)
        self.explained_variance_ratio_ = (explained / variance if variance > 0 else np.zeros(len(explained))).astype(dtype)

    def _scores(self, x: np.ndarray) -> np.ndarray:
        return x @ self.components_.T

    def _rows_from(self, scores: np.ndarray) -> np.ndarray:
        return scores @ self.components_
