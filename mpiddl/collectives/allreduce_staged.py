"""All-reduce on one node of arrays that lie anywhere: pieces pass through shared memory, and every rank adds up all of them.

Cost a rank: no messages; V copied, q V read and V written, most of it in the second cache
(`mpiddl.kernels.node_copy_sum`). Shared memory of two pieces a rank. All ranks add in rank order, so they have the same
bits. For SUM of float32 and float64 and up to MOST_RANKS ranks, whom it spares the second copy and the second barrier
of two-step; where nothing has to be copied, `allreduce_two_step.TwoStep` is faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.arena import Arena
from mpiddl.clock import now
from mpiddl.collectives.base import Queue, Steps, ceil_div
from mpiddl.kernels.node_copy_sum import PIECES, node_copy_sum
from mpiddl.topology import neighbours
from mpiddl.transport.base import PATIENCE, SUM, Op
from mpiddl.transport.shared import KernelRequest, end_kernel

HALF_BYTES = 128 * 1024
"""Of a piece: two of them a rank stay in the second cache, and a barrier costs little beside it."""

MOST_RANKS = 4


class Stage(Queue):
    """The shared memory of one communicator and dtype, kept with it."""

    def __init__(self, comm: Any, dtype: np.dtype):
        self._comm, self._half = comm, HALF_BYTES // dtype.itemsize
        self._arena = Arena(comm)
        self._arena.shared("stage", 2 * self._half, dtype)
        self._stages = np.array([array.ctypes.data for array in self._arena.peers("stage")])
        self._barrier = self._arena.barrier("stage")
        self.alone = not self._barrier  # virtual ranks, which no kernel can meet

    def __call__(self, source: np.ndarray, result: np.ndarray) -> None:
        """`allreduce_staged` in one go, arrays being 1-D, contiguous and of the right dtype, where nothing else is under way:
        what a collective costs before it begins is more than a short one takes."""
        entered, state = now(), self._barrier[1]
        arguments, before = self.call(source, result), state.item(PIECES)
        try:
            while not node_copy_sum(*arguments, PATIENCE):
                self._comm.progress()
        except BaseException:
            pieces = before + ceil_div(source.size, self._half)
            end_kernel(self._comm, node_copy_sum, arguments, lambda: state[PIECES] >= pieces)
            raise
        self._comm.meter.synchronised(entered, entered, now())

    def call(self, source: np.ndarray, result: np.ndarray) -> tuple[Any, ...]:
        """What the kernel takes."""
        return source, result, self._stages, self._half, *self._barrier


def fits(comm: Any, dtype: np.dtype, op: Op) -> bool:
    """Whether this algorithm can be used; the same on every rank."""
    local = neighbours(comm).local
    return 1 < local.size == comm.size <= MOST_RANKS and op is SUM and dtype in (np.float32, np.float64)


def stage(comm: Any, dtype: np.dtype) -> Stage:
    """The stage of ``comm`` for ``dtype``; collective at the first call."""
    return comm.kept(("stage", dtype), lambda: Stage(comm, dtype))


def allreduce_staged(comm: Any, through: Stage, source: np.ndarray, result: np.ndarray) -> Steps:
    """``result`` becomes the sum of all ranks' ``source``, which may be ``result`` itself."""
    yield KernelRequest(comm, node_copy_sum, through.call(source, result))
