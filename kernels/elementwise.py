"""The hyperbolic tangent or the logistic function of a whole block, in place; one pass."""

from __future__ import annotations

from functools import partial

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .functions import logistic, tanh
from .jit import kernel
from .lanes import INT64, base, emitter, size_of


@kernel
def tanh_columns(out, begin, end):
    """out[:, begin:end] = tanh(out[:, begin:end]) of a C-contiguous array."""
    for row in range(out.shape[0]):
        _tanh(out, base(out) + size_of(out) * (row * out.shape[1] + begin), end - begin)


@kernel
def logistic_columns(out, begin, end):
    """out[:, begin:end] = 1 / (1 + exp(-out[:, begin:end])) of a C-contiguous array."""
    for row in range(out.shape[0]):
        _logistic(out, base(out) + size_of(out) * (row * out.shape[1] + begin), end - begin)


@intrinsic
def _tanh(typing, like, line, count):
    """tanh of `count` elements in place."""
    return types.void(like, types.int64, types.int64), emitter(partial(_write, tanh), "LINE count")


@intrinsic
def _logistic(typing, like, line, count):
    """The logistic function of `count` elements in place."""
    return types.void(like, types.int64, types.int64), emitter(partial(_write, logistic), "LINE count")


def _write(function, lanes, line, count):
    builder = lanes.builder
    with cgutils.for_range_slice(builder, INT64(0), count, INT64(lanes.count), intp=INT64) as (j, _):
        mask, place = lanes.first(builder.sub(count, j)), lanes.at(line, j)
        lanes.masked_store(function(lanes, lanes.masked_load(place, mask)), place, mask)
