"""x.T @ (x @ w) for sparse rows and a few columns w; 4 nnz k operations.

A row's product with w stays in registers and is added to the result's lines at once, so the row is read once. What bounds it is
fetching a line of w and a line of the result for each entry.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpiddl.kernels.jit import kernel
from mpiddl.kernels.lanes import INT64, UNIT, base, emitter, size_of, unit_of
from mpiddl.kernels.rows.normal_product import panel_units

WIDEST = 6
"""Units of columns taken at a time: every entry's index is read once for each panel of them."""

FLUSH = 16_384
"""Rows whose sum is carried in the dtype of x: the result is too large to be added up more often."""


def sparse_scratch(d: int, columns: int) -> int:
    """Elements of scratch memory that `sparse_product` needs."""
    return columns * (d + 1)


@kernel
def sparse_product(starts, indices, values, w, start, weights, out, sums, scratch):
    """out += x.T @ y and sums += the sum of y's rows, with y = weights[:, None] * (x @ w + start).

    x (n, d) in CSR: starts (n + 1,) int64, indices int32, values of the dtype of w (d, k), start (k,) and `scratch`
    (`sparse_scratch`); k is a multiple of the lanes of a unit. out (d, k) and sums (k,) are float64; weights (n,), or
    empty: ones.
    """
    n, (d, k), size = starts.size - 1, w.shape, size_of(w)
    y, carried = base(scratch), base(scratch) + size * k
    for top in range(0, n, FLUSH):
        bottom = min(n, top + FLUSH)
        scratch[k:] = 0
        left = 0
        while left < k:
            units = panel_units(k - left, unit_of(w), WIDEST)
            for i in range(top, bottom):
                factor = weights[i] if weights.size else w.dtype.type(1)
                begin, count = starts[i], starts[i + 1] - starts[i]
                for c in range(units * unit_of(w)):
                    scratch[c] = start[left + c]
                index, value = base(indices) + 4 * begin, base(values) + size * begin
                place = size * left
                _row_product(w, units, index, value, count, base(w) + place, k, y)
                for c in range(units * unit_of(w)):
                    scratch[c] *= factor
                    sums[left + c] += scratch[c]
                _add_row(w, units, index, value, count, y, carried + place, k)
            left += units * unit_of(w)
        for j in range(d):
            for c in range(k):
                out[j, c] += scratch[k + j * k + c]


@kernel
def sparse_moments(starts, indices, values, weights, out, squares):
    """out[0] += the weighted sums of the columns, out[1] += those of their squares; out (2, d) is float64. squares (n,) is
    overwritten by the sums of the rows' squares, times their weights."""
    for i in range(starts.size - 1):
        factor, square = float(weights[i]) if weights.size else 1.0, 0.0
        for e in range(starts[i], starts[i + 1]):
            value = float(values[e])
            out[0, indices[e]] += factor * value
            out[1, indices[e]] += factor * value * value
            square += factor * value * value
        squares[i] = square


@intrinsic
def _row_product(typing, like, units, index, value, count, w, ldw, y):
    """y += the sum over entries e < count of value[e] * w[index[e]]."""
    names = "units index VALUE count W ldw Y"
    return types.void(like, *[types.int64] * 7), emitter(partial(_each_width, _write_product), names, _of_a_unit)


@intrinsic
def _add_row(typing, like, units, index, value, count, y, out, ldo):
    """out[index[e]] += value[e] * y for all entries e < count."""
    names = "units index VALUE count Y OUT ldo"
    return types.void(like, *[types.int64] * 7), emitter(partial(_each_width, _write_sum), names, _of_a_unit)


def _of_a_unit(size):
    """Elements of that many bytes."""
    return UNIT // size


def _each_width(write, lanes, units, index, **given):
    """The code for each number of units, behind a branch."""
    builder = lanes.builder
    index = builder.inttoptr(index, ir.IntType(32).as_pointer())
    for width in range(1, WIDEST + 1):
        with builder.if_then(builder.icmp_signed("==", units, INT64(width))):
            write(lanes, [v * lanes.count for v in range(width)], index, **given)


def _write_product(lanes, offsets, index, value, count, w, ldw, y):
    builder = lanes.builder
    sums = [cgutils.alloca_once(builder, lanes.vector) for _ in offsets]
    for offset, place in zip(offsets, sums, strict=True):
        builder.store(lanes.load(lanes.at(y, offset)), place)
    with cgutils.for_range(builder, count, intp=INT64) as entry:
        line, spread = _entry(lanes, index, value, entry.index, w, ldw)
        for offset, place in zip(offsets, sums, strict=True):
            builder.store(lanes.fma(spread, lanes.load(lanes.at(line, offset)), builder.load(place)), place)
    for offset, place in zip(offsets, sums, strict=True):
        lanes.store(builder.load(place), lanes.at(y, offset))


def _write_sum(lanes, offsets, index, value, count, y, out, ldo):
    builder = lanes.builder
    parts = [lanes.load(lanes.at(y, offset)) for offset in offsets]
    with cgutils.for_range(builder, count, intp=INT64) as entry:
        line, spread = _entry(lanes, index, value, entry.index, out, ldo)
        for offset, part in zip(offsets, parts, strict=True):
            place = lanes.at(line, offset)
            lanes.store(lanes.fma(spread, part, lanes.load(place)), place)


def _entry(lanes, index, value, e, matrix, stride):
    """The line of ``matrix`` that entry e belongs to, and its value in every lane."""
    builder = lanes.builder
    column = builder.sext(builder.load(builder.gep(index, [e])), INT64)
    return lanes.at(matrix, builder.mul(column, stride)), lanes.splat(builder.load(lanes.at(value, e)))
