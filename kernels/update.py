"""Fused updates: each reads parameters, gradient and moments once and writes what changes, in a single pass.

``scale`` (one over the number of rows that the summed gradient stands for) is folded in, so the mean gradient is never
written. Arrays are 1-D, contiguous, of one dtype and length; the scalars must be of that dtype too, lest float32
arithmetic be widened. Every element is computed alone, so the bits depend on no vector width.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from .jit import kernel


@kernel
def sgd(params, grad, rate, scale, decay):
    """p -= rate * (scale * g + decay * p): 2 reads and 1 write per element."""
    for i in range(params.size):
        params[i] -= rate * (scale * grad[i] + decay * params[i])


@kernel
def momentum(params, grad, velocity, rate, scale, decay, mu):
    """v = mu * v + (scale * g + decay * p); p -= rate * v: 3 reads and 2 writes per element."""
    for i in range(params.size):
        v = mu * velocity[i] + (scale * grad[i] + decay * params[i])
        velocity[i] = v
        params[i] -= rate * v


@kernel
def nesterov(params, grad, velocity, rate, scale, decay, mu):
    """g' = scale * g + decay * p; v = mu * v + g'; p -= rate * (g' + mu * v): 3 reads and 2 writes per element."""
    for i in range(params.size):
        g = scale * grad[i] + decay * params[i]
        v = mu * velocity[i] + g
        velocity[i] = v
        params[i] -= rate * (g + mu * v)


@kernel
def adam(params, grad, mean, square, step_size, scale, decay, shrink, beta1, rest1, beta2, rest2, root, eps):
    """Adam with coupled (`decay`) or decoupled (`shrink`) weight decay: 4 reads and 3 writes per element.

    g = scale * g + decay * p; m = beta1 * m + rest1 * g; s = beta2 * s + rest2 * g^2;
    p = shrink * p - step_size * m / (sqrt(s) * root + eps), where rest = 1 - beta, and `step_size` = rate /
    (1 - beta1^t) and `root` = 1 / sqrt(1 - beta2^t) carry the bias corrections of step t.
    """
    for i in range(params.size):
        p = params[i]
        g = scale * grad[i] + decay * p
        m = beta1 * mean[i] + rest1 * g
        s = beta2 * square[i] + rest2 * g * g
        mean[i] = m
        square[i] = s
        params[i] = shrink * p - step_size * m / (sqrt(s) * root + eps)


@kernel
def sum_squares(values):
    """The sum of squares in float64, by 32 running sums of fixed strides: the same bits on every machine."""
    partial = np.zeros(32)
    whole = values.size // 32 * 32
    for start in range(0, whole, 32):
        for lane in range(32):
            v = np.float64(values[start + lane])
            partial[lane] += v * v
    total = 0.0
    for lane in range(32):
        total += partial[lane]
    for i in range(whole, values.size):
        v = np.float64(values[i])
        total += v * v
    return total
