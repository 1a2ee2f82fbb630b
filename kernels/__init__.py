"""Numerical kernels for one core: numba and numpy only, no MPI, no files, no printing; nothing is compiled at import."""

from .dense import forward, input_gradient, scratch_size, weight_gradient
from .gather import gather_rows
from .loss import softmax_cross_entropy, squared_error
from .panels import IDENTITY, RELU, TANH
from .update import adam, momentum, nesterov, sgd, sum_squares

__all__ = [
    "IDENTITY",
    "RELU",
    "TANH",
    "adam",
    "forward",
    "gather_rows",
    "input_gradient",
    "momentum",
    "nesterov",
    "scratch_size",
    "sgd",
    "softmax_cross_entropy",
    "squared_error",
    "sum_squares",
    "weight_gradient",
]
