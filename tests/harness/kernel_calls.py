"""Calls of kernels with memory whose surroundings must stay as they are."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from mpiddl import kernels

IDENTITY, RELU, TANH = kernels.IDENTITY, kernels.RELU, kernels.TANH
GUARD = 4096
"""Bytes on either side of an array: all ones, which is NaN as a float and -1 as a label."""
DTYPES = ["float32", "float64"]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def guarded(values):
    """A contiguous copy of `values` between guard bytes, aligned to its elements and to no more."""
    values = np.asarray(values)
    start = GUARD + values.itemsize
    memory = np.full(start + values.nbytes + GUARD, 0xFF, np.uint8)
    inner = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    inner[...] = values
    return inner


def blank(shape, dtype):
    """A guarded array that holds NaN."""
    return guarded(np.full(shape, np.nan, dtype))


def intact(*arrays):
    """Whether the guard bytes round all of these are as they were."""
    return all(
        (array.base[: GUARD + array.itemsize] == 0xFF).all() and (array.base[-GUARD:] == 0xFF).all() for array in arrays
    )


def draw(dtype, *shape, seed=0):
    return guarded(np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype))


def close(found, wanted, size, terms):
    """Whether every element is within the rounding of a sum of `terms` products whose absolute values add up to `size`."""
    return (np.abs(found - wanted) <= 2 * (terms + 4) * np.finfo(found.dtype).eps * size).all()


def scratch(size, dtype):
    return blank(size, dtype)


def forward(x, weight, bias, activation, begin=0, end=None):
    out = blank((len(x), weight.shape[1]), x.dtype)
    work = scratch(kernels.forward_scratch(x.itemsize), x.dtype)
    kernels.forward(x, weight, bias, activation, out, work, begin, weight.shape[1] if end is None else end)
    assert intact(x, weight, bias, out, work)
    return out


def weight_gradient(x, delta, begin=0, end=None):
    """(the gradient of the weights, that of the bias)."""
    grad, bias = blank((x.shape[1], delta.shape[1]), x.dtype), blank(delta.shape[1], x.dtype)
    work = scratch(kernels.weight_gradient_scratch(*delta.shape, x.itemsize), x.dtype)
    kernels.weight_gradient(x, delta, grad, bias, False, work, begin, x.shape[1] if end is None else end)
    assert intact(x, delta, grad, bias, work)
    return grad, bias


def input_gradient(delta, weight, activation, values, begin=0, end=None):
    hidden = guarded(values)
    work = scratch(kernels.input_gradient_scratch(*delta.shape, delta.itemsize), delta.dtype)
    kernels.input_gradient(delta, weight, activation, hidden, work, begin, len(weight) if end is None else end)
    assert intact(delta, weight, hidden, work)
    return hidden


def digest_dense(dtype):
    """A fingerprint of all three kernels' results."""
    x, weight, bias, delta = draw(dtype, 33, 70), draw(dtype, 70, 45), draw(dtype, 45), draw(dtype, 33, 45)
    hidden = np.tanh(draw(dtype, 33, 70, seed=1))
    results = [forward(x, weight, bias, activation) for activation in (IDENTITY, RELU, TANH)]
    results += [*weight_gradient(x, delta), input_gradient(delta, weight, TANH, hidden)]
    return hashlib.sha256(b"".join(result.tobytes() for result in results)).hexdigest()


def labels_for(n, c):
    return guarded(np.random.default_rng([n, c]).integers(0, c, n))


def softmax_cross_entropy(logits, labels, delta=None):
    delta = blank(logits.shape, logits.dtype) if delta is None else delta
    loss, correct, bad = kernels.softmax_cross_entropy(logits, labels, delta)
    assert intact(logits, labels, delta)
    return loss, correct, bad, delta


def digest_elementwise(dtype):
    """A fingerprint of these kernels' results."""
    logits = draw(dtype, 33, 45)
    loss, _, _, delta = softmax_cross_entropy(logits, labels_for(33, 45))
    sums = np.array([loss, kernels.sum_squares(logits.ravel()), kernels.squared_error(logits, delta, blank((33, 45), dtype))])
    return hashlib.sha256(delta.tobytes() + sums.tobytes()).hexdigest()
