"""Base of `PCA` and `TruncatedSVD`: a decomposition with the conventions of scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import issparse
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import _safe_indexing, check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from mpiddl.data.arrays import refuse_masked
from mpiddl.data.sparse import checked_csr
from mpiddl.decomposition.base import Decomposition
from mpiddl.decomposition.comm_parameter import CommParameter
from mpiddl.decomposition.rows.base import Rows
from mpiddl.decomposition.rows.dense import DenseRows
from mpiddl.decomposition.rows.files import CHUNK_BYTES, FileRows, mapping
from mpiddl.decomposition.rows.sparse import SparseRows
from mpiddl.decomposition.rows_of_all import ALL, check_same
from mpiddl.layout import block_bounds
from mpiddl.transport.comm import Comm
from mpiddl.transport.uncaught import public


class Estimator(ClassNamePrefixFeaturesOutMixin, TransformerMixin, CommParameter, Decomposition):
    """A decomposition as a scikit-learn estimator."""

    @public
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Compute the components of the rows of all ranks. Collective.

        Parameters
        ----------
        X : array-like, shape (n of this rank, d)
            float32 and float64 arrays are used without a copy. A `numpy.memmap` of 64 MiB or more is read in chunks, unless
            some weights are 0: then it is copied. A rank can have no rows.
        y : ignored
        sample_weight : array-like, shape (n of this rank,), optional
            Number of times that each row counts. A row with weight 0 is left out.

        Raises
        ------
        ValueError
            On every rank, where scikit-learn raises one. On several ranks the message names the rank.
        ConvergenceError
            On every rank, if ``tol`` was not reached. The estimator then holds the best result so far.
        """
        self._fit(X, sample_weight)
        return self

    @public
    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Update the components with a further batch of rows on all ranks. Collective. The result is close to that of `fit`.

        Parameters and errors are those of `fit`. The rows must be dense, ``n_components`` must be a whole number or None, and
        the first batch must have that many rows. `fit` starts again.
        """
        self._fit(X, sample_weight, after=getattr(self, "_stream", None), stream=True)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Scores of rows, shape (n, n_components_), in the dtype of ``X``. Local."""
        check_is_fitted(self)
        x = validate_data(self, _sound(X), dtype=[np.float64, np.float32], accept_sparse="csr", ensure_min_samples=0,
                          reset=False)
        return self._scores(x)

    def inverse_transform(self, X: Any) -> np.ndarray:
        """Rows from scores (n, n_components_): the nearest to the original ones that the components span. Local."""
        check_is_fitted(self)
        scores = check_array(_sound(X), dtype=[np.float64, np.float32], ensure_min_samples=0, input_name="X")
        if scores.shape[1] != self.n_components_:
            raise ValueError(f"X: got {scores.shape[1]} columns of scores, expected {self.n_components_}, one for each "
                             "component")
        return self._rows_from(scores)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    def _divided(self, link: Comm, X: Any, sample_weight: Any) -> tuple[Any, Any]:
        """With ``rows="all"``, this rank's share of the rows."""
        if self.rows != ALL or link.size == 1:
            return X, sample_weight
        if not hasattr(X, "shape"):
            X = np.asarray(X)
        X = X.tocsr() if issparse(X) else X
        check_same(link, X, sample_weight)
        if not X.shape:  # no rows: the checks say so
            return X, sample_weight
        begin, end = block_bounds(X.shape[0], link.size, link.rank)
        part = slice(begin, end)
        return _safe_indexing(X, part), None if sample_weight is None else np.asarray(sample_weight)[part]

    def _own_rows(self, X: Any, sample_weight: Any, ranks: int, reset: bool = True) -> Rows:
        """This rank's rows, C-contiguous, not looked at one by one."""
        least = {"ensure_min_samples": 1 if ranks == 1 else 0}
        # Memory maps are left where they are: nothing is looked at, only the first pass tells what is not finite.
        options: dict[str, Any] = {"accept_sparse": "csr", "order": "C", "ensure_all_finite": False, **least}
        if _is_plain(X):
            options = {"skip_check_array": True}  # which would not change it, nor refuse it
        x = validate_data(self, _sound(X), dtype=[np.float64, np.float32], reset=reset, **options)
        weights = None if sample_weight is None else self._own_weights(sample_weight, x, least)
        numbers = None
        if weights is not None and not weights.all():
            numbers = np.flatnonzero(weights)
            x, weights = x[numbers], weights[numbers]  # as if the others were not there
        if issparse(x) or mapping(x) is None or x.nbytes <= CHUNK_BYTES:
            rows: Rows = (SparseRows if issparse(x) else DenseRows)(x, weights)
            rows.numbers = numbers
            return rows
        return FileRows(lambda begin, end: x[begin:end], x.shape[0], x.shape[1], x.dtype, weights)

    def _own_weights(self, sample_weight: Any, x: Any, least: dict[str, Any]) -> np.ndarray:
        weights = check_array(_sound(sample_weight, "sample_weight"), dtype=x.dtype, ensure_2d=False,
                              input_name="sample_weight", **least)
        if weights.shape != (x.shape[0],):
            raise ValueError(f"sample_weight: got shape {weights.shape}, expected ({x.shape[0]},), one for each row")
        if (weights < 0).any():
            raise ValueError("sample_weight: got negative weights, expected 0 or more")
        return weights

    def _random(self) -> np.random.RandomState:
        return check_random_state(self.random_state)


def _sound(X: Any, name: str = "X") -> Any:
    """``X`` without masked entries, which scikit-learn would read; a sparse matrix is checked, and in CSR."""
    if issparse(X):
        return checked_csr(X, name)
    refuse_masked(X, name)
    return X


def _is_plain(X: Any) -> bool:
    """Whether it is what solvers take."""
    if type(X) is not np.ndarray or X.ndim != 2 or not X.size:
        return False
    return X.dtype in (np.float32, np.float64) and X.flags.c_contiguous
