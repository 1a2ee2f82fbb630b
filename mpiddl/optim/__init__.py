"""Optimisers over flat buffers and learning-rate schedules; no MPI, no compilation at import."""

from mpiddl.optim.adam import Adam, AdamW
from mpiddl.optim.base import Moments, Optimiser, make_moments
from mpiddl.optim.clip import clip_norm
from mpiddl.optim.schedules import Constant, Cosine, Schedule, Step, linear_scaling
from mpiddl.optim.sgd import SGD

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
