"""All-reduce on one node of arrays that lie anywhere: ranks read each other's memory, and nothing is copied before.

Cost a rank: no messages; V/q of every other rank's source read and added up, then the other slices of the result read from
those who added them up, 2 (q-1)/q V in all; three barriers (`mpiddl.kernels.node_read_sum`). Each element is added up on one
rank, in rank order, so all have the same bits. For SUM of float32 and float64, where the operating system allows it
(`mpiddl.transport.reading`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.collectives.at_once import AtOnce
from mpiddl.errors import CommError
from mpiddl.kernels.node_read_sum import FAILED, UNREAD, WORDS, node_read_sum
from mpiddl.kernels.remote import VECTORS
from mpiddl.topology import neighbours
from mpiddl.transport.base import SUM, Op
from mpiddl.transport.reading import processes

SCRATCH_BYTES = 512 * 1024
"""What has been read and is not yet added up, of all ranks: it stays in the second cache."""

LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 16 * 1024, 256 * 1024
"""Read from one rank at a time: a call of the operating system costs as much as some KiB."""

BARRIERS = 3


class Reading(AtOnce):
    """What ranks tell each other, kept with a communicator."""

    kernel = staticmethod(node_read_sum)

    def __init__(self, comm: Any, dtype: np.dtype, others: np.ndarray):
        super().__init__(comm, WORDS, np.int64)
        piece = min(max(SCRATCH_BYTES // comm.size, LEAST_PIECE_BYTES), MOST_PIECE_BYTES)
        scratch = np.empty((comm.size, piece // dtype.itemsize), dtype)
        self._fixed = (self.addresses, others, scratch, np.empty(comm.size, np.int64), np.empty(VECTORS, np.int64))

    def arguments(self, source: np.ndarray, result: np.ndarray) -> tuple[Any, ...]:
        return source, result, *self._fixed, *self.barrier

    def barriers(self, size: int) -> int:
        return BARRIERS

    def check(self) -> None:
        if self.barrier[1].item(UNREAD):
            failed = [rank for rank, told in enumerate(self._arena.peers("own")) if told[FAILED]]
            raise CommError(
                f"allreduce: rank {failed[0]} could not read another rank's array, wanted arrays in the machine's own memory; "
                "the algorithm two-step takes others, too"
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
