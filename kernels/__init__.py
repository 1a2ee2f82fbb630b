"""Numerical kernels for one core: numba and numpy only, no MPI, no files, no printing.

Nothing is compiled at import; each kernel is compiled at its first call, or loaded from numba's cache.
"""

from .compensate import compensate, compensate_damped, compensate_scaled
from .dense_forward import forward, forward_scratch
from .dense_input_gradient import input_gradient, input_gradient_scratch
from .dense_weight_gradient import weight_gradient, weight_gradient_scratch
from .gather import gather_rows
from .lanes import WIDTH
from .loss import softmax_cross_entropy, squared_error
from .norm import sum_squares
from .panels import IDENTITY, RELU, TANH
from .update import adam, momentum, nesterov, sgd

__all__ = [
    "IDENTITY",
    "RELU",
    "TANH",
    "WIDTH",
    "adam",
    "compensate",
    "compensate_damped",
    "compensate_scaled",
    "forward",
    "forward_scratch",
    "gather_rows",
    "input_gradient",
    "input_gradient_scratch",
    "momentum",
    "nesterov",
    "sgd",
    "softmax_cross_entropy",
    "squared_error",
    "sum_squares",
    "weight_gradient",
    "weight_gradient_scratch",
]
