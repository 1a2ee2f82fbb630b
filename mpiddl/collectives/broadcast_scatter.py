"""Broadcast for long messages: the root scatters blocks, and a ring all-gather gives everybody the rest.

Cost: the root sends (P-1)/P V to scatter, every rank (P-1)/P V round the ring; P rounds. No link carries V much more
than once for each half, where a tree's root sends V log2 P times.
Source: van de Geijn's algorithm, in Thakur, Rabenseifner & Gropp 2005, doi:10.1177/1094342005051521, section 3.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.collectives.allgather_ring import allgather_ring
from mpiddl.collectives.wire import LARGEST, Wire
from mpiddl.layout import block_bounds, pieces
from mpiddl.progress.started import Steps


def broadcast_scatter(wire: Wire, buf: np.ndarray, root: int, *, largest: int = LARGEST, **options: Any) -> Steps:
    """Every rank's ``buf`` becomes the root's."""
    comm, tag, then = wire.comm, wire.tag(), wire.tag()  # both before anything is waited for, when all ranks' counts agree
    blocks = [buf[slice(*block_bounds(buf.size, comm.size, rank))] for rank in range(comm.size)]
    if comm.rank == root:
        yield from [comm.Isend(block[piece], rank, tag) for rank, block in enumerate(blocks) if rank != root
                    for piece in pieces(block.size, largest)]
    else:
        mine = blocks[comm.rank]
        yield from [comm.Irecv(mine[piece], root, tag) for piece in pieces(mine.size, largest)]
    yield from allgather_ring(wire, None, buf, tag=then, **options)
