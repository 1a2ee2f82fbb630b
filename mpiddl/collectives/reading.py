"""Sums on one node of arrays that lie anywhere: ranks read each other's memory, and nothing is copied before.

Each rank reads its slice of the others' sources and adds it up; then whoever wants the whole reads the slices of the others.
Cost a rank: no messages; V/q of every other rank's source read and added up, and (q-1)/q V read by whom gathers (all-reduce:
all, reduction: the root, reduce-scatter: nobody); three barriers (`mpiddl.kernels.node_read_sum`). Each element is added up on
one rank, in rank order, so all have the same bits. For SUM of float32 and float64, where the operating system allows it
(`mpiddl.transport.attach`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.collectives.at_once import AtOnce
from mpiddl.collectives.base import block_bounds
from mpiddl.errors import CommError
from mpiddl.kernels.node_read_sum import FAILED, UNREAD, WORDS, node_read_sum, slice_of
from mpiddl.kernels.remote import VECTORS
from mpiddl.topology import neighbours
from mpiddl.transport.attach import processes
from mpiddl.transport.base import SUM, Op

SCRATCH_BYTES = 512 * 1024
"""What has been read and is not yet added up, of all ranks: it stays in the second cache."""

LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 16 * 1024, 256 * 1024
"""Read from one rank at a time: a call of the operating system costs as much as some KiB."""

KEPT_BYTES = 16 << 20
"""Up to here what a rank has added up for a root stays allocated for the next one."""

BARRIERS = 3


class Reading(AtOnce):
    """What ranks tell each other, kept with a communicator."""

    kernel = staticmethod(node_read_sum)

    def __init__(self, comm: Any, dtype: np.dtype, others: np.ndarray):
        super().__init__(comm, WORDS, np.int64)
        piece = min(max(SCRATCH_BYTES // comm.size, LEAST_PIECE_BYTES), MOST_PIECE_BYTES)
        scratch = np.empty((comm.size, piece // dtype.itemsize), dtype)
        self._part = np.empty(0, dtype)
        self._fixed = (self.addresses, others, scratch, np.empty(comm.size, np.int64), np.empty(VECTORS, np.int64))

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
        """The same for a reduce-scatter; ``block``: this rank's (`base.block_bounds`), which does not overlap its source."""
        first, last = block_bounds(source.size, self._comm.size, self._comm.rank)
        return source, block, first, last, first, False, *self._fixed, *self.barrier

    def _slice(self, source: np.ndarray) -> tuple[int, int]:
        rank, size = self._comm.rank, self._comm.size
        return tuple(slice_of(source.size, source.itemsize, edge, size) for edge in (rank, rank + 1))

    def barriers(self, size: int) -> int:
        return BARRIERS

    def check(self) -> None:
        if self.barrier[1].item(UNREAD):
            failed = [rank for rank, told in enumerate(self._arena.peers("own")) if told[FAILED]]
            raise CommError(
                f"read: rank {failed[0]} could not read another rank's array, wanted arrays in the machine's own memory; "
                "other algorithms take others, too"
            )


def reading(comm: Any, dtype: np.dtype, op: Op) -> Reading | None:
    """What ``comm`` keeps for ``dtype``, if it can be used, which it can on every rank or on none; collective at the first
    call."""
    others = _others(comm) if op is SUM and dtype in (np.float32, np.float64) else None
    if others is None:
        return None
    found: Reading = comm.kept(("reading", dtype), lambda: Reading(comm, dtype, others))
    return None if found.alone else found


def readable(comm: Any) -> bool:
    """Whether all ranks are on one node and may read each other's memory; collective at the first call."""
    return _others(comm) is not None


def _others(comm: Any) -> np.ndarray | None:
    local = neighbours(comm).local
    return processes(local) if 1 < local.size == comm.size else None
