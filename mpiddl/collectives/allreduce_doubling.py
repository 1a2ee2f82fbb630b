"""Recursive doubling: in round k rank r exchanges everything with rank r XOR 2^k. For short messages, where rounds count.

P not a power of two: the first 2 (P - 2^m) ranks pair up, one of each pair hands its part to the other and gets the
result in the end.

Cost a rank: ceil(log2 P) rounds of V bytes (two more for the odd ones); scratch memory of V. All ranks add the same pairs,
the lower ranks' part first, so they have the same bits.
Source: Thakur, Rabenseifner & Gropp 2005, Optimization of collective communication operations in MPICH,
doi:10.1177/1094342005051521, section 4.1.
"""

from __future__ import annotations

import numpy as np

from mpiddl.collectives.wire import LARGEST, Wire
from mpiddl.layout import pieces
from mpiddl.progress.started import Steps
from mpiddl.transport.base import COMBINE, Op


def allreduce_doubling(wire: Wire, source: np.ndarray, result: np.ndarray, op: Op, *, largest: int = LARGEST) -> Steps:
    """``result`` becomes the reduction of all ranks' ``source``, which may be ``result`` itself."""
    if source is not result:
        result[...] = source
    if wire.comm.size == 1 or not result.size:
        return
    tag = wire.tag()
    with wire.scratch(min(largest, result.size), result.dtype) as scratch:
        for piece in pieces(result.size, largest):
            part = result[piece]
            yield from _double(wire, tag, part, scratch[: part.size], op)


def _double(wire: Wire, tag: int, data: np.ndarray, theirs: np.ndarray, op: Op) -> Steps:
    comm, combine = wire.comm, COMBINE[op]
    core = 1 << (comm.size.bit_length() - 1)
    extra = comm.size - core
    if comm.rank < 2 * extra and comm.rank % 2:  # hands its part to the left, and waits for the result
        yield comm.Isend(data, comm.rank - 1, tag)
        yield comm.Irecv(data, comm.rank - 1, tag)
        return
    if comm.rank < 2 * extra:
        yield comm.Irecv(theirs, comm.rank + 1, tag)
        combine(data, theirs, out=data)
    mine = comm.rank // 2 if comm.rank < 2 * extra else comm.rank - extra
    span = 1
    while span < core:
        other = mine ^ span
        partner = 2 * other if other < extra else other + extra
        coming, leaving = comm.Irecv(theirs, partner, tag), comm.Isend(data, partner, tag)
        yield coming
        yield leaving
        # Into the lower part on both sides: which of two NaNs is kept depends on where numpy writes.
        if mine < other:
            combine(data, theirs, out=data)
        else:
            combine(theirs, data, out=theirs)
            data[...] = theirs
        span *= 2
    if comm.rank < 2 * extra:
        yield comm.Isend(data, comm.rank + 1, tag)
