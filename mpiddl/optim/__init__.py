"""Optimisers over flat buffers and learning-rate schedules; no MPI, no compilation at import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpiddl.optim.adam import Adam, AdamW
from mpiddl.optim.base import Moments, Optimiser, make_moments
from mpiddl.optim.clip import clip_norm
from mpiddl.optim.schedules import Constant, Cosine, Schedule, Step, linear_scaling
from mpiddl.optim.sgd import SGD
from mpiddl.registry import OPTIMISERS

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Constant",
    "Cosine",
    "Moments",
    "Optimiser",
    "Schedule",
    "Step",
    "clip_norm",
    "linear_scaling",
    "make_moments",
]


if not TYPE_CHECKING:  # for which every name would be there

    def __getattr__(name: str) -> Any:
        """The class of a optimiser of `mpiddl.registry` that is not imported above."""
        return OPTIMISERS.attribute(__name__, name)
