"""Reduce for long messages: a ring reduce-scatter, after which every rank sends its block to the root.

Cost: a rank sends (P-1)/P V round the ring and V/P to the root, which receives (P-1)/P V more; P rounds.
Source: Thakur, Rabenseifner & Gropp 2005, doi:10.1177/1094342005051521, section 4.2 (Rabenseifner's algorithm),
with a ring for the recursive halving, which takes any P and keeps both directions of a link busy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.collectives.reduce_scatter_ring import reduce_scatter_ring
from mpiddl.collectives.wire import LARGEST, Wire
from mpiddl.layout import block_bounds, pieces
from mpiddl.progress.started import Steps
from mpiddl.transport.base import Op


def reduce_scatter_gather(wire: Wire, source: np.ndarray, result: np.ndarray | None, op: Op, root: int, *,
                          largest: int = LARGEST, **options: Any) -> Steps:
    """The root's ``result`` becomes the reduction of all ranks' ``source``; other ranks' ``result`` is not looked at."""
    comm, tag = wire.comm, wire.tag()  # drawn before anything is waited for, when all ranks' counts agree
    bounds = [block_bounds(source.size, comm.size, rank) for rank in range(comm.size)]
    begin, end = bounds[comm.rank]
    with wire.scratch(end - begin, source.dtype) as block:
        yield from reduce_scatter_ring(wire, source, block, op, **options)
        if comm.rank != root:
            yield from [comm.Isend(block[piece], root, tag) for piece in pieces(block.size, largest)]
            return
        if result is None:
            return
        result[begin:end] = block
        others = [result[slice(*bounds[rank])] if rank != root else result[:0] for rank in range(comm.size)]
        yield from [comm.Irecv(theirs[piece], rank, tag) for rank, theirs in enumerate(others)
                    for piece in pieces(theirs.size, largest)]
