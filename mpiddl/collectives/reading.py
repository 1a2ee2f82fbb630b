"""Sums on one node of arrays that lie anywhere: ranks read each other's memory, and nothing is copied before.

Each rank reads its slice of the others' sources and adds it up; then whoever wants the whole reads the slices of the others.
Cost a rank: no messages; V/q of every other rank's source read and added up, and (q-1)/q V read by whom gathers (all-reduce:
all, reduction: the root, reduce-scatter: nobody); three barriers (`mpiddl.kernels.node.node_read_sum`). Each element is added
up on one rank, in rank order, so all have the same bits. For SUM of float32 and float64, where the operating system allows it
(`mpiddl.node.process_memory`). An array that cannot be read all the same (a device's memory; a process that forbids it later)
costs more: what is not yet added up goes through shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mpiddl import kernels
from mpiddl.collectives.arguments import fused
from mpiddl.collectives.at_once import AtOnce, Further
from mpiddl.layout import block_bounds, ceil_div
from mpiddl.node.process_memory import readable
from mpiddl.transport.agree import agreed
from mpiddl.transport.base import Op
from mpiddl.transport.comm import Comm

SCRATCH_BYTES = 512 * 1024
"""What has been read and is not yet added up, of all ranks: it stays in the second cache."""

LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 16 * 1024, 256 * 1024
"""Read from one rank at a time: a call of the operating system costs as much as some KiB."""

KEPT_BYTES = 16 << 20
"""Up to here what a rank has added up for a root stays allocated for the next one."""

HALF_BYTES = 64 * 1024
"""Of a piece that goes through shared memory."""

BARRIERS = 3


class Reading(AtOnce):
    """What ranks tell each other, kept with a communicator."""

    def __init__(self, comm: Comm, dtype: np.dtype, others: np.ndarray):
        with agreed(comm):  # numba may fail to load kernels
            self._in = kernels.node_read_sum  # its names say what is where
        self.kernel = self._in.node_read_sum
        super().__init__(comm, self._in.WORDS + 2 * HALF_BYTES // 8, np.int64)
        self._half = HALF_BYTES // dtype.itemsize
        piece = min(max(SCRATCH_BYTES // comm.size, LEAST_PIECE_BYTES), MOST_PIECE_BYTES)
        scratch = np.empty((comm.size, piece // dtype.itemsize), dtype)
        self._part = np.empty(0, dtype)
        vectors = np.empty(kernels.remote.VECTORS, np.int64)
        self._fixed = (self.addresses, others, scratch, np.empty(comm.size, np.int64), vectors)

    def allreduce(self, source: np.ndarray, result: np.ndarray) -> tuple[Any, ...]:
        return source, result, *self._slice(source), 0, True, *self._fixed, *self.barrier

    def reduce(self, source: np.ndarray, result: np.ndarray | None) -> tuple[Any, ...]:
        """The same for a reduction, whose root alone has a ``result``."""
        first, last = self._slice(source)
        if result is not None:
            return source, result, first, last, 0, True, *self._fixed, *self.barrier
        if last - first > self._part.size:
            part = np.empty(last - first, source.dtype)
            if part.nbytes <= KEPT_BYTES:
                self._part = part
        else:
            part = self._part
        return source, part, first, last, first, False, *self._fixed, *self.barrier

    def reduce_scatter(self, source: np.ndarray, block: np.ndarray) -> tuple[Any, ...]:
        """The same for a reduce-scatter; ``block``: this rank's (`mpiddl.layout.block_bounds`), apart from its source."""
        first, last = block_bounds(source.size, self._comm.size, self._comm.rank)
        return source, block, first, last, first, False, *self._fixed, *self.barrier

    def _slice(self, source: np.ndarray) -> tuple[int, int]:
        rank, size = self._comm.rank, self._comm.size
        return tuple(self._in.slice_of(source.size, source.itemsize, edge, size) for edge in (rank, rank + 1))

    def barriers(self, size: int) -> int:
        return BARRIERS

    def further(self, arguments: tuple[Any, ...]) -> Iterable[Further]:
        return self._through_shared_memory(arguments) if self.barrier[1].item(self._in.UNREAD) else ()

    def _through_shared_memory(self, arguments: tuple[Any, ...]) -> Iterator[Further]:
        """Where a rank could not read: slices that are added up meet -0.0, which changes no bit, the rest is added up now."""
        state, own = self.barrier[1], self._comm.rank
        source, part, first, last, origin, gather = arguments[:6]
        whole = part if gather else np.empty_like(source)
        for rank, told in enumerate(self._arena.peers("own")):
            begin, done, end = (int(told[word]) for word in (self._in.FIRST, self._in.DONE, self._in.LAST))
            whole[begin:done] = part[begin - origin : done - origin] if rank == own else -0.0
            whole[done:end] = source[done:end]
        state[self._in.PHASE:] = 0  # both kernels keep theirs there
        stages, kernel = self.addresses + 8 * self._in.WORDS, kernels.node_copy_sum.node_copy_sum
        yield kernel, (whole, whole, stages, self._half, *self.barrier), ceil_div(whole.size, self._half)
        if not gather:
            part[first - origin : last - origin] = whole[first:last]
        state[self._in.PHASE:] = 0
        self.own[self._in.FAILED] = 0  # all have seen it; the next arrays may be others


def reading(comm: Comm, dtype: np.dtype, op: Op) -> Reading | None:
    """What ``comm`` keeps for ``dtype``, if it can be used, which it can on every rank or on none; collective at the first
    call."""
    others = readable(comm) if fused(dtype, op) else None
    if others is None:
        return None
    found: Reading = comm.kept(("reading", dtype), lambda: Reading(comm, dtype, others))
    return None if found.alone else found
