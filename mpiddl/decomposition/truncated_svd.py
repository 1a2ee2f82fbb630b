"""Truncated singular value decomposition as a scikit-learn estimator, for rows that are distributed over ranks."""

from __future__ import annotations

from mpiddl.decomposition.estimator import Estimator
from mpiddl.decomposition.singular_vectors import SingularVectors


class TruncatedSVD(Estimator, SingularVectors):
    """The largest singular values and right singular vectors of the rows of all ranks, without centring.

    It works as `PCA` does. Attributes, scaling and signs are those of `sklearn.decomposition.TruncatedSVD`.

    Parameters
    ----------
    n_components : int
        Number of components, from 1 to min(rows, columns).
    solver, tol, random_state, comm, threads, max_passes, rows
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
