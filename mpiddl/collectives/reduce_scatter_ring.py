"""Ring reduce-scatter: each rank is left with one block of the reduction, summed on its way round the ring.

Cost a rank: (P-1)/P V sent, the least there is, in P - 1 rounds; scratch memory of 3 V/P.
Source: the first half of Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddl.collectives.ring import Part, Ring
from mpiddl.collectives.wire import Wire
from mpiddl.progress.started import Steps
from mpiddl.transport.base import COMBINE, Op


def reduce_scatter_ring(wire: Wire, source: np.ndarray, block: np.ndarray, op: Op, *,
                        order: Sequence[int] | None = None, **options: Any) -> Steps:
    """``block`` becomes this rank's block (`mpiddl.layout.block_bounds`) of the reduction of all ranks' ``source``.

    ``order``: which block is each rank's, if the wire's ranks stand in another order than the blocks.
    """
    if wire.comm.size == 1:
        block[...] = source
        return
    ring, tag, combine = Ring(wire, source.size, source.itemsize, order=order, **options), wire.tag(), COMBINE[op]
    width = ring.segments * ring.slot
    with wire.scratch(3 * width, source.dtype) as scratch:

        def place(row: int, segment: int, part: Part) -> np.ndarray:
            begin = row * width + segment * ring.slot
            return scratch[begin : begin + part[1] - part[0]]

        def into(turn: int, segment: int, part: Part) -> np.ndarray:
            return place(2, segment, part)

        def arrived(turn: int, segment: int, part: Part) -> np.ndarray:
            last = turn == ring.half - 1
            first, end = (edge - begin for edge in part)
            target = block[first:end] if last else place(turn % 2, segment, part)
            return combine(source[slice(*part)], place(2, segment, part), out=target)

        begin = ring.part(wire.comm.rank, 0)[0]
        yield from ring.rounds(tag, 0, ring.half, lambda part: source[slice(*part)], into, arrived, held=1)
