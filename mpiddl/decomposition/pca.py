"""Principal component analysis as a scikit-learn estimator, for rows that are distributed over ranks."""

from __future__ import annotations

import numpy as np

from mpiddl.decomposition.estimator import Estimator
from mpiddl.decomposition.principal_components import PrincipalComponents


class PCA(Estimator, PrincipalComponents):
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
    solver : str
        A name of docs/names.md such as ``gram``; ``auto``, which chooses one (``solver_`` is the choice, ``why_`` the reason);
        or ``module:Class`` for a solver of your own. docs/decomposition.md compares them.
    tol : float
        Stop when the estimated relative error of the explained variance is at most ``tol``. 0: stop when only rounding is left.
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
    rows : {"own", "all"}
        ``"own"``: each rank passes its own rows. ``"all"``: every rank passes the same rows, and `fit` divides them.

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

    def get_covariance(self) -> np.ndarray:
        """The covariance of the probabilistic model: components, and noise in all other directions; shape (d, d)."""
        excess = np.maximum(self.explained_variance_ - self.noise_variance_, 0.0)
        covariance = (self.components_.T * excess) @ self.components_
        covariance.flat[:: len(covariance) + 1] += self.noise_variance_
        return covariance
