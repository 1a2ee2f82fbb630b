"""Binomial-tree broadcast, for short messages: those that have it pass it on, twice as many in every round.

Cost: ceil(log2 P) rounds; the root sends V up to ceil(log2 P) times, P - 1 messages in all.
Source: Thakur, Rabenseifner & Gropp 2005, doi:10.1177/1094342005051521, section 3.2.
"""

from __future__ import annotations

import numpy as np

from mpiddl.collectives.wire import LARGEST, Wire
from mpiddl.layout import pieces
from mpiddl.progress.started import Steps


def broadcast_binomial(wire: Wire, buf: np.ndarray, root: int, *, largest: int = LARGEST) -> Steps:
    """Every rank's ``buf`` becomes the root's."""
    comm, tag = wire.comm, wire.tag()
    place = (comm.rank - root) % comm.size
    span = 1
    while span < comm.size and not place & span:
        span *= 2
    for piece in pieces(buf.size, largest):
        if place:
            yield comm.Irecv(buf[piece], (comm.rank - span) % comm.size, tag)
        below = [step for step in _halves(span) if place + step < comm.size]
        yield from [comm.Isend(buf[piece], (comm.rank + step) % comm.size, tag) for step in below]


def _halves(span: int) -> list[int]:
    """span/2, span/4, ..., 1."""
    return [span >> shift for shift in range(1, span.bit_length())]
