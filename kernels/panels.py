"""Moving matrices into the order in which tiles read them, and back."""

from __future__ import annotations

from contextlib import contextmanager

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .lanes import INT64, Lanes, address

IDENTITY, RELU, TANH = 0, 1, 2
"""Activations by number."""


@intrinsic
def copy_panel(typing, source, s0, lds, rows, cols, target, t0, ldt):
    """target[t0 + i * ldt + j] = source[s0 + i * lds + j] for j < cols, and zero up to the next whole vector."""
    n = types.int64

    def generate(context, builder, signature, arguments):
        source, s0, lds, rows, cols, target, t0, ldt = arguments
        lanes = Lanes(builder, context.get_data_type(signature.args[0].dtype))
        source = address(context, builder, signature.args[0], source, s0)
        target = address(context, builder, signature.args[5], target, t0)
        with cgutils.for_range(builder, rows, intp=INT64) as row:
            line, out = (lanes.at(p, builder.mul(row.index, ld)) for p, ld in ((source, lds), (target, ldt)))
            with cgutils.for_range_slice(builder, INT64(0), cols, INT64(lanes.count), intp=INT64) as (j, _):
                mask = lanes.first(builder.sub(cols, j))
                lanes.store(lanes.masked_load(lanes.at(line, j), mask), lanes.at(out, j))
        return context.get_dummy_value()

    return types.void(source, n, n, n, n, target, n, n), generate


@intrinsic
def transpose_panel(typing, source, s0, lds, rows, cols, target, t0, ldt):
    """target[t0 + j * ldt + i] = source[s0 + i * lds + j], i < rows, j < cols; zero for i up to the next whole vector."""
    n = types.int64

    def generate(context, builder, signature, arguments):
        source, s0, lds, rows, cols, target, t0, ldt = arguments
        lanes = Lanes(builder, context.get_data_type(signature.args[0].dtype))
        source = address(context, builder, signature.args[0], source, s0)
        target = address(context, builder, signature.args[5], target, t0)
        with _blocks(lanes, rows, cols) as (i, j):
            block = _load_block(lanes, lanes.at(source, builder.add(j, builder.mul(i, lds))), lds,
                                builder.sub(rows, i), builder.sub(cols, j))
            out = lanes.at(target, builder.add(i, builder.mul(j, ldt)))
            for c, vector in enumerate(_transposed(lanes, block)):
                with builder.if_then(builder.icmp_signed(">", builder.sub(cols, j), INT64(c))):
                    lanes.store(vector, lanes.at(out, builder.mul(INT64(c), ldt)))
        return context.get_dummy_value()

    return types.void(source, n, n, n, n, target, n, n), generate


@intrinsic
def transpose_times_slope(typing, source, s0, lds, rows, cols, hidden, h0, ldh, activation):
    """hidden[h0 + j * ldh + i] = source[s0 + i * lds + j] * slope, i < rows, j < cols.

    `hidden` comes as the value of the activation, from which its slope follows: 1, (h > 0), or 1 - h^2.
    """
    n = types.int64

    def generate(context, builder, signature, arguments):
        source, s0, lds, rows, cols, hidden, h0, ldh, activation = arguments
        lanes = Lanes(builder, context.get_data_type(signature.args[0].dtype))
        source = address(context, builder, signature.args[0], source, s0)
        hidden = address(context, builder, signature.args[5], hidden, h0)
        with _blocks(lanes, rows, cols) as (i, j):
            block = _load_block(lanes, lanes.at(source, builder.add(j, builder.mul(i, lds))), lds,
                                builder.sub(rows, i), builder.sub(cols, j))
            out = lanes.at(hidden, builder.add(i, builder.mul(j, ldh)))
            mask = lanes.first(builder.sub(rows, i))
            for c, vector in enumerate(_transposed(lanes, block)):
                with builder.if_then(builder.icmp_signed(">", builder.sub(cols, j), INT64(c))):
                    place = lanes.at(out, builder.mul(INT64(c), ldh))
                    lanes.masked_store(_sloped(lanes, vector, lanes.masked_load(place, mask), activation), place, mask)
        return context.get_dummy_value()

    return types.void(source, n, n, n, n, hidden, n, n, n), generate


@contextmanager
def _blocks(lanes, rows, cols):
    """Loops over square blocks of as many rows and columns as a vector has lanes."""
    builder, step = lanes.builder, INT64(lanes.count)
    with (
        cgutils.for_range_slice(builder, INT64(0), rows, step, intp=INT64) as (i, _),
        cgutils.for_range_slice(builder, INT64(0), cols, step, intp=INT64) as (j, _),
    ):
        yield i, j


def _load_block(lanes, source, lds, rows, cols):
    """The rows of a block, zero where there is none."""
    builder = lanes.builder
    mask, nothing = lanes.first(cols), ir.Constant(lanes.mask, None)
    block = []
    for r in range(lanes.count):
        there = builder.select(builder.icmp_signed(">", rows, INT64(r)), mask, nothing)
        block.append(lanes.masked_load(lanes.at(source, builder.mul(INT64(r), lds)), there))
    return block


def _transposed(lanes, block):
    """A square block transposed in registers: at each level, the off-diagonal halves of every sub-block trade places."""
    n, span = lanes.count, 1
    while span < n:
        upper = [i if not i & span else n + i - span for i in range(n)]
        lower = [i + span if not i & span else n + i for i in range(n)]
        for r in range(n):
            if not r & span:
                pair = block[r], block[r + span]
                block[r], block[r + span] = lanes.shuffle(*pair, upper), lanes.shuffle(*pair, lower)
        span *= 2
    return block


def _sloped(lanes, vector, hidden, activation):
    """`vector` times the slope of the activation whose value is `hidden`."""
    builder = lanes.builder
    one = ir.Constant(lanes.vector, [1.0] * lanes.count)
    slope = builder.fsub(one, builder.fmul(hidden, hidden))
    is_tanh, is_relu = (builder.icmp_signed("==", activation, INT64(code)) for code in (TANH, RELU))
    smooth = builder.select(is_tanh, builder.fmul(vector, slope), vector)
    return builder.select(is_relu, lanes.positive(hidden, vector), smooth)
