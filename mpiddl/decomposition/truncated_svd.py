"""Truncated singular value decomposition as a scikit-learn estimator, for rows that are distributed over ranks."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from mpiddl.decomposition.estimator import Estimator, variances_in
from mpiddl.decomposition.solve import Result
from mpiddl.errors import UsageError


class TruncatedSVD(Estimator):
    """The largest singular values and right singular vectors of the rows of all ranks, without centring.

    It works as `PCA` does. Attributes, scaling and signs are those of `sklearn.decomposition.TruncatedSVD`.

    Parameters
    ----------
    n_components : int
        Number of components, from 1 to min(rows, columns).
    solver, tol, random_state, comm, threads, max_passes
        As in `PCA`.
    vr_fraction, batch_size, step_size, sync_every, sync_delay, snapshot_fraction
        As in `PCA`.

    Attributes
    ----------
    components_ : ndarray, shape (n_components_, d)
        Right singular vectors.
    singular_values_ : ndarray, shape (n_components_,)
        In descending order.
    explained_variance_, explained_variance_ratio_ : ndarray, shape (n_components_,)
        Variances of the scores, and their shares of the total variance.
    n_components_, n_features_in_, n_samples_, solver_, why_, n_passes_, n_rounds_, n_bytes_, seconds_, communication_seconds_,
    history_
        As in `PCA`.

    Communication
    -------------
    `fit` is collective, as in `PCA`. All other methods do not communicate.

    Examples
    --------
    >>> import numpy as np
    >>> from mpiddl.decomposition import TruncatedSVD
    >>> x = np.diag([5.0, 4.0, 3.0, 2.0, 1.0])
    >>> TruncatedSVD(n_components=2).fit(x).singular_values_
    array([5., 4.])
    """

    _center = False

    def __init__(self, n_components: int = 2, *, solver: str = "auto", tol: float = 1e-8, random_state: Any = None,
                 comm: Any = None, threads: int = 0, vr_fraction: float = 0.125, batch_size: int | None = None,
                 step_size: float = 1.0, sync_every: int | None = None, sync_delay: int = 0,
                 snapshot_fraction: float = 1.0, max_passes: float = 200):
        super().__init__(n_components, solver, tol, random_state, comm, threads, vr_fraction, batch_size, step_size, sync_every,
                         sync_delay, snapshot_fraction, max_passes)

    def _wanted(self, n: int, d: int) -> int | float:
        """Components wanted of ``n`` rows."""
        wanted, least = self.n_components, min(n, d)
        if isinstance(wanted, Integral) and not isinstance(wanted, bool) and 1 <= int(wanted) <= least:
            return int(wanted)
        raise UsageError(f"n_components: got {wanted!r}, expected a whole number from 1 to {least}, the smaller of "
                         "n_samples and n_features")

    def _take(self, result: Result, dtype: np.dtype) -> None:
        self._remember(result, dtype)
        explained = np.maximum(result.values - (result.components @ result.mean) ** 2, 0.0)
        variance = result.variances.sum()
        self.explained_variance_ = variances_in(dtype, explained)
        self.explained_variance_ratio_ = (explained / variance if variance > 0 else np.zeros(len(explained))).astype(dtype)

    def _scores(self, x: np.ndarray) -> np.ndarray:
        return x @ self.components_.T

    def _rows_from(self, scores: np.ndarray) -> np.ndarray:
        return scores @ self.components_
