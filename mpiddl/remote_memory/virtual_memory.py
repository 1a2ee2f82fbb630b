"""Remote memory of virtual ranks: arrays in one process. In simulated time, a flag takes as long as a message.

Reads, writes and atomic operations take no simulated time. Bytes that were written since the last flag count with the next one.
"""

from __future__ import annotations

import numpy as np

from mpiddl.memory import aligned_zeros
from mpiddl.remote_memory.base import WORD, Fetched
from mpiddl.remote_memory.node_memory import NodeMemory
from mpiddl.transport.base import Request
from mpiddl.transport.comm import Comm
from mpiddl.transport.virtual import VirtualRequest, VirtualTransport


class VirtualMemory(NodeMemory):
    """See `RemoteMemory`. All ranks of ``comm`` are virtual."""

    kind = "virtual"

    def __init__(self, comm: Comm, nbytes: int, flags: int):
        super().__init__(comm, nbytes, flags)
        assert isinstance(comm.transport, VirtualTransport)
        self._transport = comm.transport
        self._moments = [found.view(np.float64) for found in self._transport.exchanged(aligned_zeros(WORD * flags, np.uint8))]
        self._unseen = [0] * self.size

    def _write(self, rank: int, begin: int, data: np.ndarray) -> Request:
        self._unseen[rank] += data.size
        return super()._write(rank, begin, data)

    def _compare_swap(self, rank: int, begin: int, expected: int, value: int) -> Fetched:
        self._transport.compute(0.0)  # others have a turn: this may be asked again and again
        return super()._compare_swap(rank, begin, expected, value)

    def _signal(self, rank: int, flag: int, number: int) -> Request:
        took = self._transport.wire.seconds(self._unseen[rank] + WORD)
        self._moments[rank][flag], self._unseen[rank] = self._transport.clock + took, 0
        self._transport.world.events += 1
        return super()._signal(rank, flag, number)

    def _arrived(self, flag: int, least: int) -> Request:
        words, moments = self._own, self._moments[self.rank]
        return VirtualRequest(self._transport, lambda: moments.item(flag) if words[flag] >= least else None,
                              f"flag {flag} to be {least}")
