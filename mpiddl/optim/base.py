"""What an optimiser is: two pure functions over flat arrays, after the manner of optax."""

from __future__ import annotations

from math import isfinite
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike

from mpiddl.errors import ShapeError, UsageError

Moments = dict[str, np.ndarray]


class Optimiser(Protocol):
    """A frozen dataclass that says how parameters follow gradients; all of its state is in `moments`."""

    def init(self, n: int, dtype: DTypeLike) -> Moments:
        """Fresh moments for `n` parameters: flat zeroed arrays of that dtype, possibly none at all."""
        ...

    def update(
        self, params: np.ndarray, grad: np.ndarray, moments: Moments, rate: float, scale: float = 1.0, step: int = 0
    ) -> None:
        """Move `params` along the gradient, in place.

        Parameters
        ----------
        params, grad : ndarray, shape (n,), float32 or float64
            Contiguous; any slice of the flat buffers will do if `moments` holds the same slice.
        moments
            As `init` made them; overwritten.
        rate
            The learning rate of this step.
        scale
            The gradient used is ``scale * grad``: one over the number of rows that were summed.
        step
            How many updates these moments have already seen: 0 at the first one.
        """
        ...


def number(argument: str, value: float, *, low: float = 0.0, below: float = float("inf")) -> None:
    """Refuse `value` unless it is a finite number with low <= value < below."""
    if isinstance(value, (int, float, np.integer, np.floating)) and isfinite(value) and low <= value < below:
        return
    wanted = f"a number >= {low:g}" + (f" and < {below:g}" if isfinite(below) else "")
    raise UsageError(f"{argument}: got {value!r}, expected {wanted}")


def matching(params: np.ndarray, grad: np.ndarray, *moments: np.ndarray) -> None:
    """Refuse arrays that are not all flat, contiguous, of one size and one dtype."""
    for name, array in [("grad", grad), *((f"moments[{i}]", moment) for i, moment in enumerate(moments))]:
        if array.shape != params.shape or array.dtype != params.dtype:
            raise ShapeError(
                f"{name}: got {array.dtype} of shape {array.shape}, expected {params.dtype} of shape {params.shape}, as params"
            )
