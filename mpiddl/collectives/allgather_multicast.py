"""All-gather over multicast: each host sends the blocks of its ranks once, to all others.

Cost: the blocks of a host on its link, and all others on the same link in the other direction, at the same time. A ring sends
(P-1)/P V from each rank: N - 1 times as much, for N hosts of one rank. What a link receives is the same.
Source: as `mpiddl.collectives.broadcast_multicast`.
"""

from __future__ import annotations

import numpy as np

from mpiddl.collectives.multicast import Pieces
from mpiddl.layout import block_bounds
from mpiddl.node.topology import Topology
from mpiddl.progress.started import Steps


def allgather_multicast(through: Pieces, topology: Topology, rank: int, block: np.ndarray, result: np.ndarray) -> Steps:
    """``result`` becomes all ranks' blocks (`mpiddl.layout.block_bounds`)."""
    bounds = [block_bounds(result.nbytes // result.itemsize, topology.size, other) for other in range(topology.size)]
    data = result.view(np.uint8)
    parts = [data[begin * result.itemsize : end * result.itemsize] for begin, end in bounds]
    parts[rank][:] = block.view(np.uint8)
    others = [node for node in range(len(topology.nodes)) if node != through.node]
    longest, mine = max(part.size for part in parts), topology.local(rank)
    for begin in range(0, longest, through.piece):
        round_, width = through.round, min(through.piece, longest - begin)
        through.round += 1
        yield from through.room(round_)
        yield through.meet()
        own = parts[rank][begin : begin + width]
        through.view(round_, through.node)[mine * width :][: own.size] = own
        yield through.meet()
        through.put(round_, width * len(topology.nodes[through.node]))
        yield from through.come(round_, others)
        yield through.meet()
        for node in range(len(topology.nodes)):
            for local, other in enumerate(topology.nodes[node]):
                part = parts[other][begin : begin + width]
                if other != rank:
                    part[:] = through.view(round_, node)[local * width :][: part.size]
        yield through.meet()
        through.release(round_)
    yield from through.delivered()
