"""Adding up a node's arrays where they lie: every rank its part of all inputs, into the one result, between two barriers.

    result[i] = inputs[0][i] + inputs[1][i] + ...        begin <= i < end

Cost: q reads and one write of the part, by blocks that stay in the first cache if q > 2. One call from Python, so that a short
array costs little more than its barriers. A result that no cache holds is written past them, which saves reading it first:
three streams through memory instead of four for q = 2.
"""

from __future__ import annotations

from functools import partial

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpiddl.kernels.jit import kernel
from mpiddl.kernels.lanes import INT64, base, emitter, size_of
from mpiddl.kernels.node.atomics import fence
from mpiddl.kernels.node.meet import meet

BLOCK_BYTES = 16 * 1024
"""Of the result, added up at a time: they stay in the first cache while more inputs come."""

UNROLL = 4


@kernel
def node_sum(result, inputs, begin, end, streamed, flags, state, rank, size, patience):
    """Meet, add up, meet; returns whether it is done, else it is to be called again with the same arguments.

    `result` is a float array on a cache line; `inputs`, int64, holds the addresses of arrays of its dtype and size.
    `begin` is a multiple of a cache line's elements. `streamed` writes past the caches. `flags` and `state` are those
    of `meet`; `state` has a third element, the stage this call is in, zero at first.
    """
    if state[2] == 0:
        if not meet(flags, state, rank, size, patience):
            return False
        add_up(result, inputs, begin, end, streamed, 0)
        state[2] = 1
    if not meet(flags, state, rank, size, patience):
        return False
    state[2] = 0
    return True


@kernel
def add_up(result, inputs, begin, end, streamed, shift):
    """result[begin:end], from at least two inputs, whose elements lie `shift` bytes further than the result's."""
    width = size_of(result)
    step = BLOCK_BYTES // width
    for place in range(begin, end, step):
        count = min(step, end - place)
        out, there = base(result) + place * width, place * width + shift
        if streamed and inputs.size == 2:
            _add_past(result, out, inputs[0] + there, inputs[1] + there, count)
        else:
            _add(result, out, inputs[0] + there, inputs[1] + there, count)
        for more in range(2, inputs.size):
            _add(result, out, out, inputs[more] + there, count)
    if streamed:
        fence()


@intrinsic
def _add(typing, like, out, left, right, count):
    """out = left + right, `count` elements."""
    return types.void(like, *[types.int64] * 4), emitter(partial(_write_sum, False), "OUT LEFT RIGHT count")


@intrinsic
def _add_past(typing, like, out, left, right, count):
    """The same, written past the caches; `out` lies on a vector's boundary."""
    return types.void(like, *[types.int64] * 4), emitter(partial(_write_sum, True), "OUT LEFT RIGHT count")


def _write_sum(past, lanes, out, left, right, count):
    builder, step = lanes.builder, UNROLL * lanes.count
    whole = builder.mul(builder.sdiv(count, INT64(step)), INT64(step))
    with cgutils.for_range_slice(builder, INT64(0), whole, INT64(step), intp=INT64) as (i, _):
        sums = [builder.fadd(lanes.load(lanes.at(lanes.at(left, i), part)), lanes.load(lanes.at(lanes.at(right, i), part)))
                for part in range(0, step, lanes.count)]
        for number, value in enumerate(sums):
            lanes.store(value, lanes.at(lanes.at(out, i), number * lanes.count), past=past)
    with cgutils.for_range_slice(builder, whole, count, INT64(lanes.count), intp=INT64) as (i, _):
        mask = lanes.first(builder.sub(count, i))
        value = builder.fadd(lanes.masked_load(lanes.at(left, i), mask), lanes.masked_load(lanes.at(right, i), mask))
        lanes.masked_store(value, lanes.at(out, i), mask)
