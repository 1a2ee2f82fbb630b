"""scikit-learn's multilayer perceptrons, trained on all ranks of a communicator.

The estimators are loaded when they are first used: they load scikit-learn, which takes a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpiddl.neural_network.estimators import MLPClassifier, MLPRegressor

__all__ = ["MLPClassifier", "MLPRegressor"]


if not TYPE_CHECKING:  # for which every name would be there

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.estimators"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
