"""Principal component analysis as a scikit-learn estimator, for rows that are distributed over ranks."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from mpiddl.decomposition.estimator import Estimator, counted, variances_in
from mpiddl.decomposition.solve import Result
from mpiddl.errors import UsageError


class PCA(Estimator):
    """Principal component analysis of rows that are distributed over MPI ranks.

    Every rank calls `fit` with its own rows, any number of them, and gets the same components. `transform` and all other
    methods are local. Attributes, scaling and signs are those of `sklearn.decomposition.PCA`, which it can replace in a
    `Pipeline`.

    Parameters
    ----------
    n_components : int, float in (0, 1) or None
        Number of components. A float is the share of the variance that they explain. None means min(n, d) of all rows.
        A row of weight 3 counts as three rows, a row of weight 0 as none.
    whiten : bool
        Divide each score by its standard deviation.
    solver : {"auto", "gram", "subsample", "vr", "vr-plain", "krylov"}
        docs/decomposition.md compares them. ``auto`` chooses one: ``solver_`` is the choice, and ``why_`` the reason.
    tol : float
        Stop when the estimated relative error of the explained variance is at most ``tol``.
    random_state : int, RandomState or None
        Seed. That of rank 0 is used on all ranks.
    comm : Comm, mpi4py communicator or None
        The ranks. None means all ranks of the program (COMM_WORLD). Each `fit` works on a duplicate. `clone` shares the
        communicator. `pickle` leaves it out, so that a loaded estimator has None.
    threads : int
        Threads of this rank. 0 means the cores of the node divided by its ranks, unless an environment variable sets a number.
    vr_fraction, batch_size, step_size, sync_every, sync_delay, snapshot_fraction
        Options of the solver ``vr``: see `mpiddl.decomposition.Settings`.
    max_passes : float
        Number of passes over the data after which `fit` gives up.

    Attributes
    ----------
    components_ : ndarray, shape (n_components_, d)
        Orthonormal rows, largest variance first; the largest entry of each is positive.
    explained_variance_, explained_variance_ratio_, singular_values_ : ndarray, shape (n_components_,)
    explained_variance_error_ : ndarray, shape (n_components_,)
        Estimated error of ``explained_variance_``.
    mean_ : ndarray, shape (d,)
    noise_variance_ : float
    n_components_, n_features_in_, n_samples_ : int
        ``n_samples_`` counts the rows of all ranks.
    solver_, why_ : str
    n_passes_, n_rounds_, n_bytes_, seconds_, communication_seconds_ : float, int, int, float, float
        Passes over the data, rounds of communication, bytes that this rank sent, seconds of `fit`, and how many of them were
        communication and waiting.
    history_ : list of Moment
        After each pass: seconds, passes, rounds, estimated error, explained variance.

    Communication
    -------------
    `fit` is collective. The file of each solver states its cost. All other methods do not communicate.

    Examples
    --------
    >>> import numpy as np
    >>> from mpiddl.decomposition import PCA
    >>> x = np.random.default_rng(0).standard_normal((500, 20)) * np.linspace(3, 1, 20)
    >>> pca = PCA(n_components=2).fit(x)
    >>> pca.transform(x).shape, pca.n_samples_
    ((500, 2), 500)
    """

    def __init__(self, n_components: int | float | None = None, *, whiten: bool = False, solver: str = "auto",
                 tol: float = 1e-8, random_state: Any = None, comm: Any = None, threads: int = 0, vr_fraction: float = 0.125,
                 batch_size: int | None = None, step_size: float = 1.0, sync_every: int | None = None, sync_delay: int = 0,
                 snapshot_fraction: float = 1.0, max_passes: float = 200):
        super().__init__(n_components, solver, tol, random_state, comm, threads, vr_fraction, batch_size, step_size, sync_every,
                         sync_delay, snapshot_fraction, max_passes)
        self.whiten = whiten

    def get_covariance(self) -> np.ndarray:
        """The covariance of the probabilistic model: components, and noise in all other directions; shape (d, d)."""
        excess = np.maximum(self.explained_variance_ - self.noise_variance_, 0.0)
        covariance = (self.components_.T * excess) @ self.components_
        covariance.flat[:: len(covariance) + 1] += self.noise_variance_
        return covariance

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
        self.explained_variance_ = variances_in(dtype, explained)
        self.explained_variance_error_ = variances_in(dtype, result.errors * unbiased)
        self.explained_variance_ratio_ = (explained / variance if variance > 0 else np.zeros(k)).astype(dtype)
        self.noise_variance_ = float(max(variance - explained.sum(), 0.0) / (least - k)) if k < least else 0.0

    def _scores(self, x: np.ndarray) -> np.ndarray:
        scores = x @ self.components_.T - (self.mean_ @ self.components_.T)
        return scores / self._deviations() if self.whiten else scores

    def _rows_from(self, scores: np.ndarray) -> np.ndarray:
        return (scores * self._deviations() if self.whiten else scores) @ self.components_ + self.mean_

    def _deviations(self) -> np.ndarray:
        """Of the scores; those of constant ones are as good as 0, and dividing by them must not give infinity."""
        deviations = np.sqrt(self.explained_variance_)
        return np.maximum(deviations, np.finfo(deviations.dtype).eps)
