"""The optimiser interface: two pure functions over flat arrays, similar to optax."""

from __future__ import annotations

from math import isfinite
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike

from mpiddl.errors import ShapeError, UsageError
from mpiddl.memory import Views

Moments = dict[str, np.ndarray]


class Optimiser(Protocol):
    """An update rule for parameters. All of its state is in `moments`."""

    def init(self, n: int, dtype: DTypeLike) -> Moments:
        """Return the moments for `n` parameters: flat arrays of zeros with this dtype, or an empty dict."""
        ...

    def update(
        self, params: np.ndarray, grad: np.ndarray, moments: Moments, rate: float, scale: float = 1.0, step: int = 0
    ) -> None:
        """Update `params` in place.

        Parameters
        ----------
        params, grad : ndarray, shape (n,), float32 or float64
            Contiguous. May be any slice of the flat buffers; `moments` then holds the same slice.
        moments
            The arrays made by `init`; overwritten.
        rate
            The learning rate of this step.
        scale
            The update uses ``scale * grad``. `grad` is a sum over rows; `scale` is 1 / (number of rows).
        step
            Number of updates that these moments have already seen: 0 at the first one.
        """
        ...


def number(argument: str, value: float, *, low: float = 0.0, below: float = float("inf")) -> None:
    """Raise a `UsageError` unless `value` is a finite number with low <= value < below."""
    if isinstance(value, (int, float, np.integer, np.floating)) and isfinite(value) and low <= value < below:
        return
    wanted = f"a number >= {low:g}" + (f" and < {below:g}" if isfinite(below) else "")
    raise UsageError(f"{argument}: got {value!r}, expected {wanted}")


def make_moments(optimiser: Optimiser, params: np.ndarray) -> Views:
    """What the optimiser's `init` returns for ``params``; an error unless these are flat arrays like ``params``."""
    moments: object = optimiser.init(params.size, params.dtype)
    if not isinstance(moments, dict) or not all(isinstance(array, np.ndarray) for array in moments.values()):
        raise UsageError(f"optimiser.init: returned {moments!r:.60}, expected a dict of arrays, or an empty dict")
    for name, array in moments.items():
        if array.shape != params.shape or array.dtype != params.dtype:
            raise ShapeError(f"optimiser.init: returned {array.dtype} of shape {array.shape} as {name!r} for "
                             f"n={params.size}, expected {params.dtype} of shape {params.shape}")
    return Views(moments)


def matching(params: np.ndarray, grad: np.ndarray, *moments: np.ndarray) -> None:
    """Raise a `ShapeError` unless all arrays have the shape and dtype of `params`."""
    for name, array in [("grad", grad), *((f"moments[{i}]", moment) for i, moment in enumerate(moments))]:
        if array.shape != params.shape or array.dtype != params.dtype:
            raise ShapeError(
                f"{name}: got {array.dtype} of shape {array.shape}, expected {params.dtype} of shape {params.shape} as "
                "for params"
            )
