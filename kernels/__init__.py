"""Numerical kernels for one core: numba and numpy only, no MPI, no files, no printing.

A module of this package, and numba with it (64 MiB), is loaded when one of its names is first used: ``kernels.sgd``,
``kernels.meet.FLAGS``. Callers import the package, not the names. Each kernel is compiled at its first call, or loaded from
numba's cache.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpiddl.kernels.dense.dense_forward import forward, forward_scratch
    from mpiddl.kernels.dense.dense_input_gradient import input_gradient, input_gradient_scratch
    from mpiddl.kernels.dense.dense_weight_gradient import weight_gradient, weight_gradient_scratch
    from mpiddl.kernels.dense.network_gradient import network_gradient, network_scratch, sparse_network_gradient
    from mpiddl.kernels.dense.panels import IDENTITY, LOGISTIC, RELU, TANH

    from .compensation import compensate, compensate_scaled, damped_move, sum_of_magnitudes
    from .gather import gather_rows
    from .lanes import WIDTH
    from .loss import softmax_cross_entropy, squared_error
    from .norm import sum_squares
    from .outputs import BINARY, POISSON, SOFTMAX, SQUARED, output_loss
    from .update import adam, momentum, nesterov, rate_in_velocity, sgd

_HOME = {
    "compensate": "compensation",
    "compensate_scaled": "compensation",
    "damped_move": "compensation",
    "sum_of_magnitudes": "compensation",
    "forward": "dense.dense_forward",
    "forward_scratch": "dense.dense_forward",
    "input_gradient": "dense.dense_input_gradient",
    "input_gradient_scratch": "dense.dense_input_gradient",
    "weight_gradient": "dense.dense_weight_gradient",
    "weight_gradient_scratch": "dense.dense_weight_gradient",
    "gather_rows": "gather",
    "WIDTH": "lanes",
    "softmax_cross_entropy": "loss",
    "squared_error": "loss",
    "sum_squares": "norm",
    "network_gradient": "dense.network_gradient",
    "network_scratch": "dense.network_gradient",
    "sparse_network_gradient": "dense.network_gradient",
    "output_loss": "outputs",
    "BINARY": "outputs",
    "POISSON": "outputs",
    "SOFTMAX": "outputs",
    "SQUARED": "outputs",
    "IDENTITY": "dense.panels",
    "LOGISTIC": "dense.panels",
    "RELU": "dense.panels",
    "TANH": "dense.panels",
    "adam": "update",
    "momentum": "update",
    "nesterov": "update",
    "rate_in_velocity": "update",
    "sgd": "update",
}

__all__ = [
    "BINARY",
    "IDENTITY",
    "LOGISTIC",
    "POISSON",
    "RELU",
    "SOFTMAX",
    "SQUARED",
    "TANH",
    "WIDTH",
    "adam",
    "compensate",
    "compensate_scaled",
    "damped_move",
    "forward",
    "forward_scratch",
    "gather_rows",
    "input_gradient",
    "input_gradient_scratch",
    "momentum",
    "nesterov",
    "network_gradient",
    "network_scratch",
    "output_loss",
    "rate_in_velocity",
    "sgd",
    "softmax_cross_entropy",
    "sparse_network_gradient",
    "squared_error",
    "sum_of_magnitudes",
    "sum_squares",
    "weight_gradient",
    "weight_gradient_scratch",
]


_FOLDERS = ("", "dense.", "multicast.", "node.", "rows.")


def __getattr__(name: str) -> Any:
    """A kernel, or a module of kernels from one of the folders; kept here, so that it is looked for once."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    places = [_HOME[name]] if name in _HOME else [folder + name for folder in _FOLDERS]
    full = next((full for place in places if find_spec(full := f"{__name__}.{place}")), "")
    if not full:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(full)
    globals()[name] = found = getattr(module, name) if name in _HOME else module
    return found
