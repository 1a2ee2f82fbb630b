"""Models as pure functions of arrays; no MPI, no compilation at import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpiddl.models.base import Model, Score
from mpiddl.models.gradient_check import GradientReport, gradcheck
from mpiddl.models.mlp import MLP, Softmax
from mpiddl.registry import MODELS

__all__ = ["MLP", "GradientReport", "Model", "Score", "Softmax", "gradcheck"]


if not TYPE_CHECKING:  # for which every name would be there

    def __getattr__(name: str) -> Any:
        """The class of a model of `mpiddl.registry` that is not imported above."""
        return MODELS.attribute(__name__, name)
