"""Principal components and singular vectors of rows that are spread over ranks.

The estimators are loaded when they are first used: they load scikit-learn, which takes a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpiddl.decomposition.solve import Result, solve
from mpiddl.decomposition.solvers.base import Moment
from mpiddl.decomposition.solvers.settings import Settings

if TYPE_CHECKING:
    from mpiddl.decomposition.pca import PCA
    from mpiddl.decomposition.truncated_svd import TruncatedSVD

_HOME = {"PCA": "pca", "TruncatedSVD": "truncated_svd"}

__all__ = ["PCA", "Moment", "Result", "Settings", "TruncatedSVD", "solve"]


if not TYPE_CHECKING:  # for which every name would be there

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
