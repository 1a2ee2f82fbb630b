"""Moving matrices into the order in which tiles read them, and back."""

from __future__ import annotations

from contextlib import contextmanager

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpiddl.kernels.dense.tile import ROWS
from mpiddl.kernels.lanes import INT32, INT64, emitter

IDENTITY, RELU, TANH, LOGISTIC = 0, 1, 2, 3
"""Activations by number."""

GROUPS = 4
"""Groups of columns that are copied together."""

_PANEL = "SOURCE lds rows cols TARGET ldt"


@intrinsic
def copy_panel(typing, like, source, lds, rows, cols, target, ldt, sums):
    """target[i * ldt + j] = source[i * lds + j], i < rows, j < cols; then anything up to the next whole vector.

    sums[j] += the sum over i, in that order, unless `sums` is 0.
    """
    return types.void(like, *[types.int64] * 7), emitter(_copy_panel, _PANEL + " SUMS")


@intrinsic
def copy_columns(typing, like, source, lds, rows, cols, target, ldt, listed, ldl, counts, ldc):
    """Columns in groups of ROWS, without the rows of a group that are all zero.

    target[g * ldt + p * ROWS + j] = source[i * lds + g * ROWS + j] with i = listed[g * ldl + p], for p < counts[g * ldc] and
    g * ROWS + j < cols; the last group is filled up with zeros. `listed` and `counts` are int32. Of target and listed, `rows`
    lines of a group may be overwritten.
    """
    kinds = types.void(like, *[types.int64] * 10)
    return kinds, emitter(_copy_columns, "SOURCE lds rows cols TARGET ldt LISTED ldl COUNTS ldc", lambda size: ROWS)


@intrinsic
def word_at(typing, address):
    """The int32 at an address."""

    def generate(context, builder, signature, arguments):
        return builder.sext(builder.load(builder.inttoptr(arguments[0], INT32.as_pointer())), INT64)

    return types.int64(types.int64), generate


@intrinsic
def transpose_panel(typing, like, source, lds, rows, cols, target, ldt):
    """target[j * ldt + i] = source[i * lds + j], i < rows, j < cols; then anything up to the next whole vector."""
    return types.void(like, *[types.int64] * 6), emitter(_transpose, _PANEL)


@intrinsic
def transpose_times_slope(typing, like, source, lds, rows, cols, target, ldt, activation):
    """target[j * ldt + i] = source[i * lds + j] * slope, i < rows, j < cols.

    `target` comes holding the value of the activation, from which its slope follows: 1, (h > 0), or 1 - h^2.
    """
    return types.void(like, *[types.int64] * 7), emitter(_transpose_times_slope, _PANEL + " activation")


def _copy_panel(lanes, source, lds, rows, cols, target, ldt, sums):
    builder = lanes.builder
    wanted = builder.icmp_unsigned("!=", builder.ptrtoint(sums, INT64), INT64(0))
    with cgutils.for_range_slice(builder, INT64(0), cols, INT64(lanes.count), intp=INT64) as (j, _):
        mask, column, out = lanes.first(builder.sub(cols, j)), lanes.at(source, j), lanes.at(target, j)
        total = cgutils.alloca_once_value(builder, lanes.constant(0))
        with builder.if_then(wanted):
            builder.store(lanes.masked_load(lanes.at(sums, j), mask), total)
        with cgutils.for_range(builder, rows, intp=INT64) as row:
            value = lanes.masked_load(lanes.at(column, builder.mul(row.index, lds)), mask)
            lanes.store(value, lanes.at(out, builder.mul(row.index, ldt)))
            builder.store(builder.fadd(builder.load(total), value), total)
        with builder.if_then(wanted):
            lanes.masked_store(builder.load(total), lanes.at(sums, j), mask)


def _copy_columns(lanes, source, lds, rows, cols, target, ldt, listed, ldl, counts, ldc):
    # Some groups at a time: one alone would fetch every line of the source twice or more, and all of them together
    # would throw each other out of the first cache where `rows` is a power of two.
    builder = lanes.builder
    listed, counts = (builder.bitcast(pointer, INT32.as_pointer()) for pointer in (listed, counts))
    groups = builder.udiv(builder.add(cols, INT64(ROWS - 1)), INT64(ROWS))
    whole = builder.mul(builder.udiv(cols, INT64(GROUPS * ROWS)), INT64(GROUPS))

    def copy(first, number):
        places = [builder.add(first, INT64(group)) for group in range(number)]
        outs = [lanes.at(target, builder.mul(place, ldt)) for place in places]
        lists = [builder.gep(listed, [builder.mul(place, ldl)]) for place in places]
        found = [cgutils.alloca_once_value(builder, INT64(0)) for _ in places]
        for place in found:
            builder.store(INT64(0), place)
        masks = [lanes.first(builder.sub(cols, builder.mul(place, INT64(ROWS)))) for place in places]
        with cgutils.for_range(builder, rows, intp=INT64) as row:
            line = lanes.at(source, builder.add(builder.mul(first, INT64(ROWS)), builder.mul(row.index, lds)))
            for group in range(number):
                value = lanes.masked_load(lanes.at(line, group * ROWS), masks[group]) if number == 1 else lanes.load(
                    lanes.at(line, group * ROWS))
                position = builder.load(found[group])
                lanes.store(value, lanes.at(outs[group], builder.mul(position, INT64(ROWS))))
                builder.store(builder.trunc(row.index, INT32), builder.gep(lists[group], [position]))
                builder.store(builder.add(position, _any(lanes, value)), found[group])
        for place, position in zip(places, found, strict=True):
            builder.store(builder.trunc(builder.load(position), INT32), builder.gep(counts, [builder.mul(place, ldc)]))

    with cgutils.for_range_slice(builder, INT64(0), whole, INT64(GROUPS), intp=INT64) as (first, _):
        copy(first, GROUPS)
    with cgutils.for_range_slice(builder, whole, groups, INT64(1), intp=INT64) as (first, _):
        copy(first, 1)


def _any(lanes, vector):
    """1 if an element is not zero (NaN is not), else 0."""
    bits = ir.IntType(lanes.count)
    mask = lanes.builder.bitcast(lanes.builder.fcmp_unordered("!=", vector, lanes.constant(0)), bits)
    return lanes.builder.zext(lanes.builder.icmp_unsigned("!=", mask, bits(0)), INT64)


def _transpose(lanes, source, lds, rows, cols, target, ldt):
    builder = lanes.builder
    with _squares(lanes, source, lds, rows, cols) as (i, lines):
        for j, line in lines:
            lanes.store(line, lanes.at(target, builder.add(i, builder.mul(j, ldt))))


def _transpose_times_slope(lanes, source, lds, rows, cols, target, ldt, activation):
    builder = lanes.builder
    with _squares(lanes, source, lds, rows, cols) as (i, lines):
        mask = lanes.first(builder.sub(rows, i))
        for j, line in lines:
            place = lanes.at(target, builder.add(i, builder.mul(j, ldt)))
            value = _times_slope(lanes, line, lanes.masked_load(place, mask), activation)
            lanes.masked_store(value, place, mask)


@contextmanager
def _squares(lanes, source, lds, rows, cols):
    """Loops over squares of as many rows and columns as there are lanes: the first row of each, and (column, transposed
    line) for all of its columns, behind a branch that skips columns which do not exist.
    """
    builder, step = lanes.builder, INT64(lanes.count)
    with (
        cgutils.for_range_slice(builder, INT64(0), rows, step, intp=INT64) as (i, _),
        cgutils.for_range_slice(builder, INT64(0), cols, step, intp=INT64) as (j, _),
    ):
        corner = lanes.at(source, builder.add(j, builder.mul(i, lds)))
        square = _transposed(lanes, _load_square(lanes, corner, lds, builder.sub(rows, i), builder.sub(cols, j)))
        yield i, _existing(builder, j, cols, square)


def _existing(builder, j, cols, lines):
    """(column, line) for each column, each within its own branch."""
    for c, line in enumerate(lines):
        column = builder.add(j, INT64(c))
        with builder.if_then(builder.icmp_signed("<", column, cols)):
            yield column, line


def _load_square(lanes, corner, lds, rows, cols):
    """The lines of a square; where there are fewer, the last one again."""
    builder = lanes.builder
    mask, last = lanes.first(cols), builder.sub(rows, INT64(1))
    square = []
    for r in range(lanes.count):
        row = builder.select(builder.icmp_signed("<", INT64(r), last), INT64(r), last)
        square.append(lanes.masked_load(lanes.at(corner, builder.mul(row, lds)), mask))
    return square


def _transposed(lanes, square):
    """A square transposed in registers: at each level, the off-diagonal quarters of every sub-square trade places."""
    n, span = lanes.count, 1
    while span < n:
        upper = [i if not i & span else n + i - span for i in range(n)]
        lower = [i + span if not i & span else n + i for i in range(n)]
        for r in (r for r in range(n) if not r & span):
            pair = square[r], square[r + span]
            square[r], square[r + span] = lanes.shuffle(*pair, upper), lanes.shuffle(*pair, lower)
        span *= 2
    return square


def _times_slope(lanes, vector, hidden, activation):
    """`vector` times the slope of the activation whose value is `hidden`."""
    builder = lanes.builder
    slope = builder.fsub(lanes.constant(1), builder.fmul(hidden, hidden))
    bell = builder.fmul(hidden, builder.fsub(lanes.constant(1), hidden))
    is_tanh, is_relu, is_logistic = (builder.icmp_signed("==", activation, INT64(code)) for code in (TANH, RELU, LOGISTIC))
    slope = builder.select(is_tanh, slope, builder.select(is_logistic, bell, lanes.constant(1)))
    smooth = builder.fmul(vector, slope)
    return builder.select(is_relu, lanes.positive(hidden, vector), smooth)
