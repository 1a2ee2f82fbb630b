"""Fits of scikit-learn's PCA and TruncatedSVD in an unchanged program."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
from scipy.sparse import issparse
from sklearn import decomposition as theirs
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data

from mpiddl import decomposition as ours
from mpiddl.decomposition.rows_of_all import ALL
from mpiddl.errors import ConvergenceError, MismatchError
from mpiddl.neural_network.samples import alike
from mpiddl.programs.sklearn_estimators import agreed_reason
from mpiddl.transport.comm import Comm

TOL = 1e-8
"""Estimated relative error of an explained variance in the place of scikit-learn's randomised solver, which states none."""

DIFFER = "data that differ between ranks (set random_state where they are drawn or split)"


def pca(link: Comm, model: Any, name: str, args: tuple[Any, ...], options: dict[str, Any], found: list[Any]) -> str:
    """Fit in place of `PCA.fit` or `PCA.fit_transform`: see `sklearn_estimators.Attempt`. Collective."""
    return _fit(link, model, name, _rows(*args, **options), found, theirs.PCA, _pca)


def truncated_svd(link: Comm, model: Any, name: str, args: tuple[Any, ...], options: dict[str, Any], found: list[Any]) -> str:
    """Fit in place of `TruncatedSVD.fit` or `fit_transform`: see `sklearn_estimators.Attempt`. Collective."""
    return _fit(link, model, name, _rows(*args, **options), found, theirs.TruncatedSVD, _svd)


def _rows(X: Any, y: Any = None) -> Any:
    return X


def _fit(link: Comm, model: Any, name: str, X: Any, found: list[Any], kind: type, one: Any) -> str:
    reason = agreed_reason(link, model, _overridden(model, kind) or _unknown_array(X))
    if reason:
        return reason
    try:
        with alike(link):
            model._validate_params()
            x = validate_data(model, X, accept_sparse=["csr", "csc"], dtype=[np.float64, np.float32], copy=False,
                              ensure_min_features=1 if kind is theirs.PCA else 2)
        reason = one(link, model, x)
    except MismatchError:
        return DIFFER
    except ConvergenceError:
        return "no solver of mpiddl reached the tolerance"
    if not reason:
        found.append(model if name == "fit" else model.transform(X))
    return reason


def _overridden(model: Any, kind: type) -> str:
    """Whether a subclass computes in a way of its own."""
    for name in ("_fit", "_fit_full", "_fit_truncated", "transform"):
        if getattr(type(model), name, None) is not getattr(kind, name, None):
            return f"{type(model).__name__} has its own {name}"
    return ""


def _unknown_array(X: Any) -> str:
    """Whether rows lie elsewhere, such as on a GPU."""
    known = issparse(X) or isinstance(X, (np.ndarray, list, tuple)) or hasattr(X, "iloc")
    return "" if known else f"rows of type {type(X).__name__}"


def _pca(link: Comm, model: Any, x: Any) -> str:
    solver, least = model.svd_solver, min(x.shape)
    wanted = model.n_components
    if isinstance(wanted, str):
        return f"n_components={wanted!r}"
    if solver == "auto":
        solver = _chosen(x, wanted)
    if solver == "full":
        return "svd_solver='full', which is more exact for the smallest components"
    if solver not in ("covariance_eigh", "randomized", "arpack") or (issparse(x) and solver == "randomized"):
        return f"svd_solver={solver!r}"
    if wanted is None:
        wanted = least - (solver == "arpack")
    whole = isinstance(wanted, Integral)
    if x.shape[0] < 2 or not (1 <= wanted <= least - (solver == "arpack") if whole else
                              0 < wanted < 1 and solver == "covariance_eigh"):
        return f"n_components={model.n_components!r}"
    estimator = ours.PCA(int(wanted) if whole else float(wanted), whiten=model.whiten, comm=link, rows=ALL,
                         solver="gram" if solver == "covariance_eigh" else "auto",
                         tol=min(model.tol, 0.1) if solver == "arpack" else TOL,
                         random_state=check_random_state(model.random_state)).fit(x)
    model._fit_svd_solver = solver
    _take(model, estimator, ("components_", "explained_variance_", "explained_variance_ratio_", "singular_values_", "mean_"), x)
    model.noise_variance_ = x.dtype.type(estimator.noise_variance_)
    model.n_components_, model.n_samples_ = estimator.n_components_, x.shape[0]
    return ""


def _chosen(x: Any, wanted: Any) -> str:
    """What scikit-learn's `svd_solver="auto"` stands for."""
    n, d = x.shape
    if issparse(x):
        return "arpack"
    if d <= 1000 and n >= 10 * d:
        return "covariance_eigh"
    small = max(n, d) <= 500
    return "randomized" if not small and wanted is not None and 1 <= wanted < 0.8 * min(n, d) else "full"


def _svd(link: Comm, model: Any, x: Any) -> str:
    if not 1 <= model.n_components < min(x.shape):
        return f"n_components={model.n_components} for {x.shape[0]} rows of {x.shape[1]} columns"
    tol = min(model.tol, 0.1) if model.algorithm == "arpack" else TOL
    estimator = ours.TruncatedSVD(int(model.n_components), comm=link, rows=ALL, tol=tol,
                                  random_state=check_random_state(model.random_state)).fit(x)
    _take(model, estimator, ("components_", "explained_variance_", "explained_variance_ratio_", "singular_values_"), x)
    return ""


def _take(model: Any, estimator: Any, names: tuple[str, ...], x: Any) -> None:
    """Attributes in the dtype that scikit-learn gives them: that of the rows."""
    for name in names:
        setattr(model, name, np.ascontiguousarray(getattr(estimator, name), x.dtype))
