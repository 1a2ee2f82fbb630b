"""What a row adds to the moments of the columns, and how long it is.

    F[j] += s (A[j] - M[j]),    Q[j] += s (A[j] - M[j])^2;    returns sum_j (A[j] - M[j])^2
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .lanes import INT64, emitter


@intrinsic
def row_moments(typing, like, a, m, f, q, factor, count):
    """Addresses of A, M, F and Q (count,) and of s; `like` is an array of their dtype. Returns a tuple of one number."""
    returns = types.Tuple((like.dtype,))
    return returns(like, *[types.int64] * 6), emitter(_write, "A M F Q FACTOR count")


def _write(lanes, a, m, f, q, factor, count):
    builder = lanes.builder
    factor, square = lanes.splat(builder.load(factor)), cgutils.alloca_once_value(builder, lanes.constant(0))
    whole = builder.mul(builder.udiv(count, INT64(lanes.count)), INT64(lanes.count))
    with cgutils.for_range_slice(builder, INT64(0), whole, INT64(lanes.count), intp=INT64) as (left, _):
        middle, first, second = (lanes.load(lanes.at(line, left)) for line in (m, f, q))
        moved = builder.fsub(lanes.load(lanes.at(a, left)), middle)
        weighted = builder.fmul(moved, factor)
        lanes.store(builder.fadd(first, weighted), lanes.at(f, left))
        lanes.store(lanes.fma(weighted, moved, second), lanes.at(q, left))
        builder.store(lanes.fma(moved, moved, builder.load(square)), square)
    mask = lanes.first(builder.sub(count, whole))
    value, middle, first, second = (lanes.masked_load(lanes.at(line, whole), mask) for line in (a, m, f, q))
    moved = builder.fsub(value, middle)
    weighted = builder.fmul(moved, factor)
    lanes.masked_store(builder.fadd(first, weighted), lanes.at(f, whole), mask)
    lanes.masked_store(lanes.fma(weighted, moved, second), lanes.at(q, whole), mask)
    return (lanes.lane(lanes.fold(lanes.fma(moved, moved, builder.load(square)), builder.fadd)),)
