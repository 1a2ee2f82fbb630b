"""Broadcast over multicast: the root's host sends one copy, and the switch makes one for each other host.

Cost: V on the link of the root's host, and V on each other link at the same time; what gets lost is sent again. Where multicast
does not work, a chain (`mpiddl.collectives.broadcast_chain`) has the same cost a link, and takes P - 2 segments longer.
Source: one copy a link is the lower bound; reliable multicast as in `mpiddl.transport.multicast.channel`. Multicast collectives
over InfiniBand: Khalilov et al. 2024, arXiv:2408.13356.
"""

from __future__ import annotations

import numpy as np

from mpiddl.collectives.multicast import Pieces
from mpiddl.layout import pieces
from mpiddl.progress.started import Steps


def broadcast_multicast(through: Pieces, buf: np.ndarray, node: int, is_root: bool) -> Steps:
    """Every rank's ``buf`` becomes that of the root, which is on host ``node``."""
    data, sending = buf.view(np.uint8), through.node == node
    for piece in pieces(data.size, through.piece):
        round_, part = through.round, data[piece]
        through.round += 1
        memory = through.view(round_, node)[: part.size]
        if sending:
            yield from through.room(round_)
            yield through.meet()
            if is_root:
                memory[:] = part
        else:
            yield from through.come(round_, [node])
        yield through.meet()
        if sending:
            through.put(round_, part.size)
        if not is_root:
            part[:] = memory
        yield through.meet()
        through.release(round_)
    if sending:
        yield from through.delivered()
