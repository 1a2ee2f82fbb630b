"""Fused updates: each reads parameters, gradient and moments once and writes what changes, in a single pass.

``scale`` (one over the number of rows that the summed gradient stands for) is folded in, so the mean gradient is never
written. Arrays are 1-D, contiguous, of one dtype and length; the scalars must be of that dtype too, lest float32
arithmetic be widened. Every element is computed alone, so the bits depend on no vector width.

Moments below the smallest normal number are stored as zero. Those of a unit that has died shrink by a constant factor
at every step; left alone they become subnormal after some hundred steps and stay so, and then each costs the processor
a hundred cycles (a whole update of 784-256-128-10 took 14 times as long).
"""

from __future__ import annotations

from math import sqrt

from .jit import kernel
from .lanes import least_of


@kernel
def sgd(params, grad, rate, scale, decay):
    """p -= rate * (scale * g + decay * p): 2 reads and 1 write per element."""
    for i in range(params.size):
        params[i] -= rate * (scale * grad[i] + decay * params[i])


@kernel
def momentum(params, grad, velocity, rate, scale, decay, mu):
    """v = mu * v + (scale * g + decay * p); p -= rate * v: 3 reads and 2 writes per element."""
    least, zero = least_of(params), velocity.dtype.type(0)
    for i in range(params.size):
        v = mu * velocity[i] + (scale * grad[i] + decay * params[i])
        v = zero if abs(v) < least else v
        velocity[i] = v
        params[i] -= rate * v


@kernel
def nesterov(params, grad, velocity, rate, scale, decay, mu):
    """g' = scale * g + decay * p; v = mu * v + g'; p -= rate * (g' + mu * v): 3 reads and 2 writes per element."""
    least, zero = least_of(params), velocity.dtype.type(0)
    for i in range(params.size):
        g = scale * grad[i] + decay * params[i]
        v = mu * velocity[i] + g
        v = zero if abs(v) < least else v
        velocity[i] = v
        params[i] -= rate * (g + mu * v)


@kernel
def rate_in_velocity(params, grad, velocity, rate, scale, decay, mu, nesterov):
    """g' = scale * g + decay * p; v = mu * v - rate * g'; p += v, or mu * v - rate * g' if `nesterov`; as `momentum` costs.

    The rate is part of the velocity, as in scikit-learn: after a change of the rate, earlier gradients keep theirs.
    """
    least, zero = least_of(params), velocity.dtype.type(0)
    for i in range(params.size):
        move = rate * (scale * grad[i] + decay * params[i])
        v = mu * velocity[i] - move
        v = zero if abs(v) < least else v
        velocity[i] = v
        params[i] += mu * v - move if nesterov else v


@kernel
def adam(params, grad, mean, square, step_size, scale, decay, shrink, beta1, rest1, beta2, rest2, root, eps):
    """Adam with coupled (`decay`) or decoupled (`shrink`) weight decay: 4 reads and 3 writes per element.

    g = scale * g + decay * p; m = beta1 * m + rest1 * g; s = beta2 * s + rest2 * g^2;
    p = shrink * p - step_size * m / (sqrt(s) * root + eps), where rest = 1 - beta, and `step_size` = rate /
    (1 - beta1^t) and `root` = 1 / sqrt(1 - beta2^t) carry the bias corrections of step t.
    """
    least, zero = least_of(params), mean.dtype.type(0)
    for i in range(params.size):
        p = params[i]
        g = scale * grad[i] + decay * p
        m = beta1 * mean[i] + rest1 * g
        m = zero if abs(m) < least else m
        s = beta2 * square[i] + rest2 * g * g
        s = zero if s < least else s
        mean[i] = m
        square[i] = s
        params[i] = shrink * p - step_size * m / (sqrt(s) * root + eps)
