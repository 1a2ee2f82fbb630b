"""All-reduce on one node of arrays that lie anywhere: pieces pass through shared memory, and every rank adds up all of them.

Cost a rank: no messages; V copied, q V read and V written, most of it in the second cache
(`mpiddl.kernels.node.node_copy_sum`). Shared memory of two pieces a rank. All ranks add in rank order, so they have the same
bits. For SUM of float32 and float64 and up to MOST_RANKS ranks, whom it spares the second copy and the second barrier
of two-step; where nothing has to be copied, `allreduce_two_step.TwoStep` is faster, and so is `reading` where ranks
may read each other's memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl import kernels
from mpiddl.collectives.arguments import fused
from mpiddl.collectives.at_once import AtOnce
from mpiddl.layout import ceil_div
from mpiddl.node.topology import neighbours
from mpiddl.transport.agree import agreed
from mpiddl.transport.base import Op
from mpiddl.transport.comm import Comm

HALF_BYTES = 128 * 1024
"""Of a piece: two of them a rank stay in the second cache, and a barrier costs little beside it."""

MOST_RANKS = 4


class Stage(AtOnce):
    """The shared memory of one communicator and dtype, kept with it."""

    def __init__(self, comm: Comm, dtype: np.dtype):
        with agreed(comm):  # numba may fail to load kernels
            self.kernel = kernels.node_copy_sum.node_copy_sum
        self._half = HALF_BYTES // dtype.itemsize
        super().__init__(comm, 2 * self._half, dtype)

    def allreduce(self, source: np.ndarray, result: np.ndarray) -> tuple[Any, ...]:
        return source, result, self.addresses, self._half, *self.barrier

    def barriers(self, size: int) -> int:
        return ceil_div(size, self._half)


def stage(comm: Comm, dtype: np.dtype, op: Op) -> Stage | None:
    """The stage of ``comm`` for ``dtype``, if it can be used, which it can on every rank or on none; collective at the first
    call."""
    local = neighbours(comm).local
    if not 1 < local.size == comm.size <= MOST_RANKS or not fused(dtype, op):
        return None
    found: Stage = comm.kept(("stage", dtype), lambda: Stage(comm, dtype))
    return None if found.alone else found
