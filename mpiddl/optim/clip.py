"""Clipping by the global norm. The gradient is not changed: the factor goes into the optimiser's scale."""

from __future__ import annotations

from math import sqrt

import numpy as np

from mpiddl import kernels
from mpiddl.errors import UsageError


def clip_norm(grad: np.ndarray, scale: float, max_norm: float) -> tuple[float, float]:
    """Return a scale that limits the norm of ``scale * grad`` to `max_norm`, and the norm before clipping.

    Parameters
    ----------
    grad : ndarray, shape (n,), float32 or float64
        The flat gradient; not changed. Squares are summed in float64, always in the same order.
    scale
        As for `Optimiser.update`.
    max_norm
        Largest Euclidean norm allowed, > 0.

    Returns
    -------
    scale, norm : float
        Pass the first to ``update``. The factor is ``max_norm / (norm + 1e-6)`` when that is below one, as in
        ``torch.nn.utils.clip_grad_norm_``.

    Raises
    ------
    UsageError
        If `max_norm` is not positive.

    Examples
    --------
    >>> import numpy as np
    >>> scale, norm = clip_norm(np.array([3.0, 4.0]), 2.0, max_norm=1.0)
    >>> norm
    10.0
    >>> round(scale, 6)
    0.2
    """
    if not max_norm > 0:
        raise UsageError(f"max_norm: got {max_norm!r}, expected a number > 0")
    norm = abs(scale) * sqrt(kernels.sum_squares(grad))
    return scale * min(1.0, max_norm / (norm + 1e-6)), norm
