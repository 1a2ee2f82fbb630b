"""Models as pure functions of arrays; no MPI, no compilation at import."""

from mpiddl.models.base import Model, Score
from mpiddl.models.gradient_check import GradientReport, gradcheck
from mpiddl.models.mlp import MLP, Softmax

__all__ = ["MLP", "GradientReport", "Model", "Score", "Softmax", "gradcheck"]
