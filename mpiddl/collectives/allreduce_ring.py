"""Ring all-reduce: a reduce-scatter and an all-gather round the ring of all ranks, node by node.

Cost a rank: 2 (P-1)/P V sent, the least there is, in 2 (P-1) rounds; scratch memory of V/P. Every element is added up
on one path round the ring and then copied, so all ranks have the same bits.
Source: Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002, theorem 1 and section 3.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.collectives.ring import Own, Part, Ring
from mpiddl.collectives.wire import Wire
from mpiddl.progress.started import Steps
from mpiddl.transport.base import COMBINE, Op


def allreduce_ring(wire: Wire, source: np.ndarray, result: np.ndarray, op: Op, **options: Any) -> Steps:
    """``result`` becomes the reduction of all ranks' ``source``, which may be ``result`` itself."""
    if wire.comm.size == 1:
        if source is not result:
            result[...] = source
        return iter(())
    return reduce_round(wire, lambda begin, end: source[begin:end], result, op, **options)


def reduce_round(wire: Wire, own: Own, result: np.ndarray, op: Op, tag: int | None = None, **options: Any) -> Steps:
    """The same of contributions made when they are needed: ``own(begin, end)`` is called once for each segment.

    ``tag`` is that of all messages, drawn before where this may begin in another order than it was started in.
    """
    ring, combine = Ring(wire, result.size, result.itemsize, **options), COMBINE[op]
    tag = wire.tag() if tag is None else tag
    with wire.scratch(ring.segments * ring.slot, result.dtype) as scratch:

        def into(turn: int, segment: int, part: Part) -> np.ndarray:
            if turn >= ring.half:
                return result[slice(*part)]
            begin = segment * ring.slot
            return scratch[begin : begin + part[1] - part[0]]

        def arrived(turn: int, segment: int, part: Part) -> np.ndarray:
            target = result[slice(*part)]
            if turn < ring.half:
                combine(own(*part), into(turn, segment, part), out=target)
            return target

        yield from ring.rounds(tag, 0, 2 * ring.half, lambda part: own(*part), into, arrived)
