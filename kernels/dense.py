"""The three products of a dense layer (plain form; the tiled form follows)."""

from __future__ import annotations

import numpy as np

IDENTITY, RELU, TANH = 0, 1, 2


def forward(x, weight, bias, activation, out):
    """out = activation(x @ weight + bias)."""
    np.matmul(x, weight, out=out)
    out += bias
    if activation == RELU:
        np.maximum(out, 0, out=out)
    elif activation == TANH:
        np.tanh(out, out=out)


def weight_gradient(x, delta, grad_weight, grad_bias):
    """grad_weight = x.T @ delta, grad_bias = the sum of the rows of delta."""
    np.matmul(x.T, delta, out=grad_weight)
    np.sum(delta, axis=0, out=grad_bias)


def input_gradient(delta, weight, activation, hidden):
    """hidden = (delta @ weight.T) * derivative, where hidden comes as the activation's value."""
    product = delta @ weight.T
    if activation == RELU:
        product *= hidden > 0
    elif activation == TANH:
        product *= 1 - hidden * hidden
    hidden[:] = product
