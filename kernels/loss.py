"""Losses with their gradients, in one go over the outputs of the last layer.

Sums over the rows, not means; the sum of the losses is kept in float64, in the order of the rows.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from math import log

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .functions import exp
from .jit import kernel
from .lanes import INT64, base, emitter, size_of

SUM_BYTES = 64
"""Bytes of the vectors here, whatever the machine has, so that sums over classes are in one order everywhere."""


@kernel
def softmax_cross_entropy(logits, labels, delta):
    """Loss and correct count of n rows, and delta = softmax(logits) - onehot(labels); O(n c).

    logits and delta (n, c) are C-contiguous and may be the same array; labels (n,) are int64. Returns (loss, correct,
    bad): `bad` is the first row whose label is outside 0..c-1 (it and those behind it are not computed), or -1. The
    class found is the first of the largest logits.
    """
    rows, classes = logits.shape
    loss, correct = 0.0, 0
    for r in range(rows):
        label = labels[r]
        if label < 0 or label >= classes:
            return loss, correct, r
        own = np.float64(logits[r, label])
        line = size_of(logits) * classes * r
        largest, total, found = softmax_row(logits, base(logits) + line, base(delta) + line, classes)
        delta[r, label] -= 1
        loss += log(np.float64(total)) + (np.float64(largest) - own)
        correct += found == label
    return loss, correct, -1


@kernel
def squared_error(outputs, targets, delta):
    """Loss = 1/2 sum of (outputs - targets)^2, and delta = outputs - targets; delta may be outputs itself."""
    loss = 0.0
    for r in range(outputs.shape[0]):
        for c in range(outputs.shape[1]):
            difference = outputs[r, c] - targets[r, c]
            delta[r, c] = difference
            loss += 0.5 * np.float64(difference) * np.float64(difference)
    return loss


@intrinsic
def softmax_row(typing, like, source, target, count):
    """target = softmax(source), `count` elements; returns the largest, the sum of exp(x - largest), the argmax."""
    returns = types.Tuple((like.dtype, like.dtype, types.int64))
    kinds = (like, types.int64, types.int64, types.int64)
    return returns(*kinds), emitter(_write_softmax, "SOURCE TARGET count", lambda size: SUM_BYTES // size)


def _write_softmax(lanes, source, target, count):
    builder = lanes.builder
    largest, found = _largest(lanes, source, count)
    sums = cgutils.alloca_once_value(builder, lanes.constant(0))
    with _blocks(lanes, count) as (j, mask):
        value = lanes.masked_load(lanes.at(source, j), mask)
        power = builder.select(mask, exp(lanes, builder.fsub(value, largest)), lanes.constant(0))
        lanes.masked_store(power, lanes.at(target, j), mask)
        builder.store(builder.fadd(builder.load(sums), power), sums)
    total = lanes.fold(builder.load(sums), builder.fadd)
    with _blocks(lanes, count) as (j, mask):
        place = lanes.at(target, j)
        lanes.masked_store(builder.fdiv(lanes.masked_load(place, mask), total), place, mask)
    return lanes.lane(largest), lanes.lane(total), found


def _largest(lanes, source, count):
    """The largest element, in every lane, and the first index where it is found."""
    builder = lanes.builder
    integers = ir.VectorType(ir.IntType(8 * lanes.size), lanes.count)
    best = cgutils.alloca_once_value(builder, lanes.constant(float("-inf")))
    where = cgutils.alloca_once_value(builder, ir.Constant(integers, None))
    with _blocks(lanes, count) as (j, mask):
        value = lanes.masked_load(lanes.at(source, j), mask, float("-inf"))
        better = builder.fcmp_ordered(">", value, builder.load(best))
        first = lanes.splat(builder.trunc(j, integers.element) if lanes.size == 4 else j)
        index = builder.add(first, ir.Constant(integers, list(range(lanes.count))))
        builder.store(builder.select(better, value, builder.load(best)), best)
        builder.store(builder.select(better, index, builder.load(where)), where)
    largest = lanes.fold(builder.load(best), partial(_select, builder, builder.fcmp_ordered, ">"))
    # Of the lanes that hold it, the one that found it first.
    holds = builder.fcmp_ordered("==", builder.load(best), largest)
    never = ir.Constant(integers, [2**31 - 1] * lanes.count)
    first = lanes.fold(builder.select(holds, builder.load(where), never), partial(_select, builder, builder.icmp_signed, "<"))
    found = lanes.lane(first)
    return largest, found if lanes.size == 8 else builder.sext(found, INT64)


def _select(builder, compare, relation, x, y):
    """Lane by lane, x if it stands in that relation to y, else y."""
    return builder.select(compare(relation, x, y), x, y)


@contextmanager
def _blocks(lanes, count):
    """A loop over `count` elements by whole vectors: the first element of each, and its mask."""
    step = INT64(lanes.count)
    with cgutils.for_range_slice(lanes.builder, INT64(0), count, step, intp=INT64) as (j, _):
        yield j, lanes.first(lanes.builder.sub(count, j))
