"""Late gradients: corrected to first order, or their steps damped. A gradient changes by about g g^T (p - before), of which the
diagonal is taken. Every element is computed alone, so the bits depend on no vector width.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from .jit import kernel
from .lanes import least_of

SUMS = 32
"""Running sums of `sum_of_magnitudes`: independent additions, which a vector can hold."""


@kernel
def compensate(grad, params, before, strength):
    """g += strength * g * g * (p - before): 3 reads and 1 write per element."""
    for i in range(grad.size):
        g = grad[i]
        grad[i] = g + strength * g * g * (params[i] - before[i])


@kernel
def compensate_scaled(grad, params, before, square, strength, decay, rest, eps):
    """s = decay * s + rest * g^2; g += strength / sqrt(s + eps) * g * g * (p - before): 4 reads and 2 writes per element."""
    least, zero = least_of(params), square.dtype.type(0)
    for i in range(grad.size):
        g = grad[i]
        s = decay * square[i] + rest * g * g
        s = zero if s < least else s
        square[i] = s
        grad[i] = g + strength / sqrt(s + eps) * g * g * (params[i] - before[i])


@kernel
def damped_move(params, moved, grad, square, decay, rest, damping, growth):
    """s = decay * s + rest * g^2; d = growth / sqrt(1 + damping * s); p += d * (moved - p). Where d is 1, p = moved.

    4 reads and 2 writes per element.
    """
    least, zero, one = least_of(params), square.dtype.type(0), square.dtype.type(1)
    for i in range(grad.size):
        g = grad[i]
        s = decay * square[i] + rest * g * g
        s = zero if s < least else s
        square[i] = s
        d = growth / sqrt(one + damping * s)
        params[i] = moved[i] if d == one else params[i] + d * (moved[i] - params[i])


@kernel
def sum_of_magnitudes(values):
    """The sum of the magnitudes of ``values`` (n,), in float64: 1 read per element. Element i goes into sum i modulo `SUMS`."""
    sums, whole = np.zeros(SUMS), values.size // SUMS * SUMS
    for i in range(0, whole, SUMS):
        for lane in range(SUMS):
            sums[lane] += abs(values[i + lane])
    for i in range(whole, values.size):
        sums[i - whole] += abs(values[i])
    return sums.sum()
