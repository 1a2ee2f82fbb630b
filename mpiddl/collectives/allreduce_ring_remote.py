"""Ring all-reduce over remote memory: each rank writes into the memory of its right neighbour, and nothing is agreed in a call.

The rounds are those of `mpiddl.collectives.allreduce_ring`. A segment is written where the neighbour needs it, and a flag after
it: the number of the call. Addresses are exchanged once, when it is set up. No rank tells another one that its memory is free:

- Scratch memory has a place for each round of the reduce-scatter. A rank that begins the next call has the complete sum of this
  one, to which its right neighbour has added all that it got. So the neighbour's scratch memory is free.
- A complete part is written over a neighbour's contribution only when the sum contains it.

Cost a rank: 2 (P-1)/P V written, in 2 (P-1) rounds of 8-byte flags; scratch memory of (P-1)/P V. Over verbs and shared memory,
no copies but the writes themselves.
Source: the ring: Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002. Writing without a handshake: Xue et al. 2019,
arXiv:1805.08430, section 3.2 (static placement). That no answers are needed is ours.
"""

from __future__ import annotations

import numpy as np

from mpiddl.layout import block_bounds, ceil_div
from mpiddl.progress.started import Queue, Started, Steps, run
from mpiddl.remote_memory import allocate
from mpiddl.transport.base import COMBINE, SUM, Op, Request
from mpiddl.transport.comm import Comm

SEGMENT_BYTES = 256 * 1024
"""Bytes of one write. The neighbour adds them up while the next write is on its way."""


class RemoteRing(Queue):
    """An all-reduce that is set up once: fill ``input``, call it, read ``result``.

    Parameters
    ----------
    comm : Comm
    size, dtype, op :
        Of the arrays.
    kind : str
        What carries it; see `mpiddl.remote_memory.allocate`.
    segment_bytes : int
        Size of a write.

    Attributes
    ----------
    input, result : ndarray, shape (size,)
        The same memory: this rank's contribution before a call, the reduction after it.

    Communication
    -------------
    Making it is collective. A call writes what the module says.
    """

    def __init__(self, comm: Comm, size: int, dtype: np.dtype, op: Op = SUM, kind: str = "auto",
                 segment_bytes: int = SEGMENT_BYTES):
        self._comm, self._size, self._combine, self._call = comm, size, COMBINE[op], 0
        ranks, self._itemsize = comm.size, dtype.itemsize
        self._chunk = ceil_div(size, ranks)
        self._segments = max(1, ceil_div(self._chunk * dtype.itemsize, segment_bytes))
        self._rounds = ranks - 1
        words = size + self._rounds * self._chunk
        self._memory = allocate(comm, words * dtype.itemsize, 2 * self._rounds * self._segments, kind)
        whole = self._memory.local.view(dtype)
        self.input = self.result = whole[:size]
        self._scratch = whole[size:].reshape(self._rounds, self._chunk)
        self._memory.register(whole)
        self.freed = False

    @property
    def placed(self) -> str:
        """In words, where ``input`` lies."""
        return f"remote memory ({self._memory.kind}), which the left neighbour writes to"

    def __call__(self) -> np.ndarray:
        """Reduce, and return ``result``."""
        self.start(blocking=True)
        return self.result

    def start(self, blocking: bool = False) -> Started:
        """The same without waiting: a request. ``input`` must not be touched before it is complete."""
        return run(self._comm, (), self._steps(), blocking, self)

    def _steps(self) -> Steps:
        self._call += 1
        rank, ranks, leaving = self._comm.rank, self._comm.size, list[Request]()
        for segment in range(self._segments if self._rounds else 0):
            self._write(0, segment, rank - 1, leaving)
        for turn in range(2 * self._rounds):
            for segment in range(self._segments):
                yield self._memory.arrived(self._flag(turn, segment), self._call)
                chunk = (rank - turn - 2) % ranks
                begin, end = self._part(chunk, segment)
                if turn < self._rounds:
                    first, _ = self._part(chunk, 0)
                    came = self._scratch[turn, begin - first : end - first]
                    self._combine(self.result[begin:end], came, out=self.result[begin:end])
                if turn + 1 < 2 * self._rounds:
                    self._write(turn + 1, segment, chunk, leaving)
        yield from leaving  # their memory may be written by the caller

    def _write(self, turn: int, segment: int, chunk: int, leaving: list[Request]) -> None:
        """Into the right neighbour's scratch memory, or its result; the flag says that it is there."""
        begin, end = self._part(chunk % self._comm.size, segment)
        right = (self._comm.rank + 1) % self._comm.size
        first, _ = self._part(chunk % self._comm.size, 0)
        at = self._size + turn * self._chunk + begin - first if turn < self._rounds else begin
        if begin < end:
            leaving.append(self._memory.write(right, at * self._itemsize, self.result[begin:end]))
            self._comm.meter.sent((end - begin) * self._itemsize)
        leaving.append(self._memory.signal(right, self._flag(turn, segment), self._call))

    def _flag(self, turn: int, segment: int) -> int:
        return turn * self._segments + segment

    def _part(self, chunk: int, segment: int) -> tuple[int, int]:
        """Begin and end of a segment of a chunk."""
        begin, end = block_bounds(self._size, self._comm.size, chunk)
        first, last = block_bounds(end - begin, self._segments, segment)
        return begin + first, begin + last

    def Free(self) -> None:
        """Give the memory back; collective."""
        if not self.freed:
            self.freed = True
            self._memory.Free()
