"""The sum of squares, in float64 and in one order on every machine."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import kernel
from .lanes import INT64, Lanes, base, emitter, size_of

SUMS = 32
"""Running sums: element i goes into sum i modulo this."""

LANES = 8


@kernel
def sum_squares(values):
    """The sum of the squares of a contiguous 1-D array, in float64; one read per element."""
    whole = values.size // SUMS * SUMS
    (total,) = _sum_squares(values, base(values), whole)
    (rest,) = _sum_squares(values, base(values) + whole * size_of(values), values.size - whole)
    return total + rest


@intrinsic
def _sum_squares(typing, like, values, count):
    """The sum of `count` squares: a multiple of SUMS of them, or fewer than SUMS."""
    returns = types.Tuple((types.float64,))
    return returns(like, types.int64, types.int64), emitter(_write, "VALUES count", lambda size: LANES)


def _write(lanes, values, count):
    builder, wide = lanes.builder, Lanes(lanes.builder, ir.DoubleType(), LANES)
    sums = [cgutils.alloca_once_value(builder, wide.constant(0)) for _ in range(SUMS // LANES)]
    with cgutils.for_range_slice(builder, INT64(0), count, INT64(SUMS), intp=INT64) as (i, _):
        for part, place in enumerate(sums):
            first = builder.add(i, INT64(part * LANES))
            value = lanes.masked_load(lanes.at(values, first), lanes.first(builder.sub(count, first)))
            value = builder.fpext(value, wide.vector) if lanes.size == 4 else value
            builder.store(wide.fma(value, value, builder.load(place)), place)
    first, second, third, fourth = (builder.load(place) for place in sums)
    total = builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth))
    return (wide.lane(wide.fold(total, builder.fadd)),)
