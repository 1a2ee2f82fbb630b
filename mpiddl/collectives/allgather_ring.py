"""Ring all-gather: blocks go round until every rank has all of them.

Cost a rank: (P-1)/P V sent, V being all blocks together, in P - 1 rounds; no scratch memory.
Source: the second half of Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddl.collectives.ring import Part, Ring
from mpiddl.collectives.wire import Wire
from mpiddl.layout import block_bounds
from mpiddl.progress.started import Steps


def allgather_ring(wire: Wire, block: np.ndarray | None, result: np.ndarray, *, tag: int | None = None,
                   order: Sequence[int] | None = None, **options: Any) -> Steps:
    """``result`` becomes all ranks' blocks (`mpiddl.layout.block_bounds`); ``block`` None: it is in its place already.

    ``tag``: one drawn before, by a collective of which this is a later part. ``order``: which block is each rank's, if
    the wire's ranks stand in another order than the blocks.
    """
    comm = wire.comm
    ring = Ring(wire, result.size, result.itemsize, order=order, **options)
    begin, end = block_bounds(result.size, comm.size, ring.order[comm.rank])
    if block is not None:
        result[begin:end] = block
    if comm.size == 1:
        return
    tag = wire.tag() if tag is None else tag

    def there(turn: int, segment: int, part: Part) -> np.ndarray:
        return result[slice(*part)]

    yield from ring.rounds(tag, ring.half, 2 * ring.half, lambda part: result[slice(*part)], there, there)
