"""Gradients that come late, corrected to first order: what they have changed since is about g g^T (p - before), of which the
diagonal is taken. Every element is computed alone, so the bits depend on no vector width.
"""

from __future__ import annotations

from math import sqrt

from .jit import kernel
from .lanes import least_of


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
def compensate_damped(grad, params, before, square, decay, rest, correction, strength, damping):
    """s = decay * s + rest * g^2; h = correction * s; g = (g + strength * h * (p - before)) / sqrt(1 + (damping * h)^2).

    4 reads and 2 writes per element.
    """
    least, zero, one = least_of(params), square.dtype.type(0), square.dtype.type(1)
    for i in range(grad.size):
        g = grad[i]
        s = decay * square[i] + rest * g * g
        s = zero if s < least else s
        square[i] = s
        h = correction * s
        late = damping * h
        grad[i] = (g + strength * h * (params[i] - before[i])) / sqrt(one + late * late)
