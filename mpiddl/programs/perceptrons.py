"""A fit of scikit-learn's MLP in an unchanged program."""

from __future__ import annotations

from typing import Any

from mpiddl.decomposition.rows_of_all import ALL
from mpiddl.errors import MismatchError
from mpiddl.neural_network.estimators import MLPClassifier, MLPRegressor
from mpiddl.neural_network.fit import fit, not_served
from mpiddl.programs.sklearn_estimators import agreed_reason
from mpiddl.transport.comm import Comm


def perceptron(link: Comm, model: Any, name: str, args: tuple[Any, ...], options: dict[str, Any], found: list[Any]) -> str:
    """Fit in place of `_fit`, which `fit` and `partial_fit` call: see `sklearn_estimators.Attempt`. Collective."""
    if isinstance(model, (MLPClassifier, MLPRegressor)):
        return "an estimator of mpiddl with settings that only scikit-learn's code can train"
    reason = agreed_reason(link, model, not_served(model))
    if reason:
        return reason
    try:
        fit(model, link, *_arguments(*args, **options), ALL, 0)
    except MismatchError:
        return "data that differ between ranks (set random_state where they are drawn or split)"
    found.append(model)
    return ""


def _arguments(X: Any, y: Any, sample_weight: Any = None, incremental: bool = False) -> tuple[Any, Any, Any, bool]:
    return X, y, sample_weight, incremental
