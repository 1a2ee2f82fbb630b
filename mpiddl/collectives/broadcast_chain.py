"""Pipelined chain broadcast, for long messages: every rank hands segments on to the next while more of them come.

Cost: every rank but the last sends V once; P - 2 segments more than that in time. Half the time of scatter and
all-gather where links carry both directions at once, since no link carries V more than once.
Source: the pipelined linear tree of Träff, Ripke, Siebert, Balaji, Thakur & Gropp 2008,
doi:10.1007/978-3-540-87475-1_17.
"""

from __future__ import annotations

import numpy as np

from mpiddl.collectives.wire import LARGEST, Wire
from mpiddl.layout import pieces
from mpiddl.progress.started import Steps
from mpiddl.transport.base import Request

AHEAD = 4
"""Segments under way to the next rank. Open MPI sends all that are started in turns: with more, none would arrive early."""


def broadcast_chain(wire: Wire, buf: np.ndarray, root: int, *, segment_bytes: int | None = None) -> Steps:
    """Every rank's ``buf`` becomes the root's."""
    comm, tag = wire.comm, wire.tag()
    place = (comm.rank - root) % comm.size
    most = min(LARGEST, max(1, (segment_bytes or wire.segment_bytes) // buf.itemsize))
    parts = [buf[piece] for piece in pieces(buf.size, most)]
    coming = [comm.Irecv(part, (comm.rank - 1) % comm.size, tag) for part in parts] if place else []
    leaving: list[Request] = []
    for number, part in enumerate(parts):
        if place:
            yield coming[number]
        if place < comm.size - 1:
            if number >= AHEAD:
                yield leaving[number - AHEAD]
            leaving.append(comm.Isend(part, (comm.rank + 1) % comm.size, tag))
    yield from leaving[-AHEAD:]
