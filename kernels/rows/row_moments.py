"""What a few rows add to the moments of the columns, and how long they are.

    F[j] += s_r (A[r, j] - M[j]),    Q[j] += s_r (A[r, j] - M[j])^2,    one row r after the other;
    returns sum_j (A[r, j] - M[j])^2 for each

Several at a time: M, F and Q then come from the second cache once for all of them, and no row's sum waits for itself.
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpiddl.kernels.lanes import INT64, emitter

ROWS = 4
"""Rows at a time."""


@intrinsic
def row_moments(typing, like, a, lda, rows, m, f, q, factors, step, count):
    """Addresses of A, M, F, Q (count,) and of the factors s_r, `step` elements apart; A's rows are `lda` elements apart.

    `like` is an array of their dtype. Of at most `ROWS` rows; returns a tuple of as many squares, meaningless behind `rows`.
    """
    returns = types.UniTuple(like.dtype, ROWS)
    return returns(like, *[types.int64] * 9), emitter(_write, "A lda rows M F Q FACTORS step count")


def _write(lanes, a, lda, rows, m, f, q, factors, step, count):
    builder, last = lanes.builder, lanes.builder.sub(rows, INT64(1))
    order = [INT64(r) for r in range(ROWS)]
    there = [builder.icmp_signed("<=", row, last) for row in order]
    order = [builder.select(exists, row, last) for exists, row in zip(there, order, strict=True)]
    given = [lanes.splat(builder.load(lanes.at(factors, builder.mul(row, step)))) for row in order]
    given = [builder.select(exists, factor, lanes.constant(0)) for exists, factor in zip(there, given, strict=True)]
    heads = [lanes.at(a, builder.mul(row, lda)) for row in order]
    squares = [cgutils.alloca_once_value(builder, lanes.constant(0)) for _ in order]

    def add(left, load):
        """One vector of columns."""
        middle, first, second = (load(lanes.at(line, left)) for line in (m, f, q))
        for head, factor, square in zip(heads, given, squares, strict=True):
            moved = builder.fsub(load(lanes.at(head, left)), middle)
            weighted = builder.fmul(moved, factor)
            first, second = builder.fadd(first, weighted), lanes.fma(weighted, moved, second)
            builder.store(lanes.fma(moved, moved, builder.load(square)), square)
        return first, second

    whole = builder.mul(builder.udiv(count, INT64(lanes.count)), INT64(lanes.count))
    with cgutils.for_range_slice(builder, INT64(0), whole, INT64(lanes.count), intp=INT64) as (left, _):
        for line, value in zip((f, q), add(left, lanes.load), strict=True):
            lanes.store(value, lanes.at(line, left))
    mask = lanes.first(builder.sub(count, whole))
    for line, value in zip((f, q), add(whole, lambda pointer: lanes.masked_load(pointer, mask)), strict=True):
        lanes.masked_store(value, lanes.at(line, whole), mask)
    return [lanes.lane(lanes.fold(builder.load(square), builder.fadd)) for square in squares]
