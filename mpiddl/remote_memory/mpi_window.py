"""Remote memory over MPI: a window that is open to all ranks all the time (MPI-3.1, chapter 11).

MPI does not order two Puts. So a flag is set only when the writes before it are complete at the receiver (``Win_flush``). Many
MPI libraries move one-sided data only while the receiving rank is in a call of theirs: a rank that computes for long may be
slow to answer.

Cost: a write is one message; a flag, a fetch or a swap is a message and an answer.
"""

from __future__ import annotations

import numpy as np

from mpiddl.errors import TransportError
from mpiddl.remote_memory.base import WORD, Fetched, Found, RemoteMemory
from mpiddl.transport.agree import agreed
from mpiddl.transport.base import Request
from mpiddl.transport.comm import Comm, Over
from mpiddl.transport.mpi import MpiComm
from mpiddl.transport.start import load_mpi


class MpiWindow(RemoteMemory):
    """See `RemoteMemory`. A `TransportError` on all ranks if the MPI library offers no windows here.

    own : int64 array that exists, in place of new memory.
    """

    kind = "MPI"

    def __init__(self, comm: Comm, nbytes: int, flags: int, own: np.ndarray | None = None):
        if not isinstance(comm, MpiComm):
            raise TransportError(f"one-sided memory: got {comm.library()}, expected MPI ranks")
        super().__init__(comm, nbytes, flags)
        self._mpi = load_mpi()
        with agreed(comm):
            try:
                win = self._mpi.Win
                self._window = (win.Allocate(max(WORD * self._words_of(nbytes), WORD), 1, comm=comm.raw) if own is None
                                else win.Create(own, 1, comm=comm.raw))
            except self._mpi.Exception as error:
                raise TransportError(f"one-sided memory: {comm.library()}: {error}") from None
        self._lay(np.frombuffer(self._window.tomemory(), np.int64) if own is None else own)
        if own is None:
            self._own[:] = 0
        self._window.Lock_all(self._mpi.MODE_NOCHECK)
        comm.Barrier()  # all are zero

    def _write(self, rank: int, begin: int, data: np.ndarray) -> Request:
        request: Request = self._window.Rput(data, rank, (self._at(begin), data.size, self._mpi.BYTE))
        return request

    def _read(self, rank: int, begin: int, data: np.ndarray) -> Request:
        request: Request = self._window.Rget(data, rank, (self._at(begin), data.size, self._mpi.BYTE))
        return request

    def _fetch_add(self, rank: int, begin: int, value: int) -> Fetched:
        found = np.zeros(1, np.int64)
        self._window.Fetch_and_op(np.array([value]), found, rank, self._at(begin), self._mpi.SUM)
        self._window.Flush(rank)
        return Found(found.item())

    def _compare_swap(self, rank: int, begin: int, expected: int, value: int) -> Fetched:
        found = np.zeros(1, np.int64)
        self._window.Compare_and_swap(np.array([value]), np.array([expected]), found, rank, self._at(begin))
        self._window.Flush(rank)
        return Found(found.item())

    def _signal(self, rank: int, flag: int, number: int) -> Request:
        self._window.Flush(rank)
        self._window.Accumulate(np.array([number]), rank, WORD * flag, self._mpi.REPLACE)  # of 8 bytes in one step
        self._window.Flush(rank)
        return Over()

    def _at(self, begin: int) -> int:
        return WORD * self._front + begin

    def progress(self) -> None:
        super().progress()
        self._window.Sync()

    def Free(self) -> None:
        if not self.freed:
            self.freed = True
            self._window.Unlock_all()
            self._window.Free()
