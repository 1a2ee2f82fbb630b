"""Binomial-tree reduce, for short messages: in round k every rank whose bit k is set hands its sum to the one without it.

Cost: ceil(log2 P) rounds; a rank sends V once, the root nothing; scratch memory of V.
Source: Thakur, Rabenseifner & Gropp 2005, doi:10.1177/1094342005051521, section 4.2.
"""

from __future__ import annotations

import numpy as np

from mpiddl.collectives.wire import LARGEST, Wire
from mpiddl.layout import pieces
from mpiddl.progress.started import Steps
from mpiddl.transport.base import COMBINE, Op


def reduce_binomial(wire: Wire, source: np.ndarray, result: np.ndarray | None, op: Op, root: int, *,
                    largest: int = LARGEST) -> Steps:
    """The root's ``result`` becomes the reduction of all ranks' ``source``; other ranks' ``result`` is not looked at."""
    comm, combine, tag = wire.comm, COMBINE[op], wire.tag()
    place = (comm.rank - root) % comm.size
    with wire.scratch(2 * min(largest, source.size), source.dtype) as scratch:
        for piece in pieces(source.size, largest):
            part = source[piece]
            total, theirs = scratch[: part.size], scratch[part.size : 2 * part.size]
            if place == 0 and result is not None:
                total = result[piece]
            if total is not part:
                total[...] = part
            span = 1
            while span < comm.size and not place & span:
                if place + span < comm.size:
                    yield comm.Irecv(theirs, (comm.rank + span) % comm.size, tag)
                    combine(total, theirs, out=total)
                span *= 2
            if place:
                yield comm.Isend(total, (comm.rank - span) % comm.size, tag)
