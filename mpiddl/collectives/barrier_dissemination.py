"""Dissemination barrier: in round k rank r tells rank r + 2^k, and hears from rank r - 2^k, that it has come.

Cost a rank: ceil(log2 P) rounds of one empty message.
Source: Hensgen, Finkel & Manber 1988, Two algorithms for barrier synchronization, doi:10.1007/BF01379320.
"""

from __future__ import annotations

import numpy as np

from mpiddl.collectives.wire import Wire
from mpiddl.progress.started import Steps


def barrier_dissemination(wire: Wire) -> Steps:
    """Over when all ranks have called it."""
    comm, tag, span = wire.comm, wire.tag(), 1
    heard = np.empty(0, np.uint8)
    while span < comm.size:
        coming = comm.Irecv(heard, (comm.rank - span) % comm.size, tag)
        yield comm.Isend(heard, (comm.rank + span) % comm.size, tag)
        yield coming
        span *= 2
