"""Remote memory of ranks on one host: shared memory. A write or a read is one copy, by the rank that asks for it.

Cost: a write or a read of n bytes is one copy of n bytes.
"""

from __future__ import annotations

import numpy as np

from mpiddl import kernels
from mpiddl.remote_memory.base import WORD, Fetched, Found, RemoteMemory
from mpiddl.transport.base import Request
from mpiddl.transport.comm import Comm, Over

OVER = Over()


class NodeMemory(RemoteMemory):
    """See `RemoteMemory`. All ranks of ``comm`` are on one host."""

    kind = "shared memory"

    def __init__(self, comm: Comm, nbytes: int, flags: int):
        super().__init__(comm, nbytes, flags)
        self._shared = comm.share(WORD * self._words_of(nbytes))
        self._words = [segment.view(np.int64) for segment in self._shared.segments]
        self._regions = [words[self._front :].view(np.uint8) for words in self._words]
        self._lay(self._words[self.rank])

    def _write(self, rank: int, begin: int, data: np.ndarray) -> Request:
        self._regions[rank][begin : begin + data.size] = data
        return OVER

    def _read(self, rank: int, begin: int, data: np.ndarray) -> Request:
        data[:] = self._regions[rank][begin : begin + data.size]
        return OVER

    def _fetch_add(self, rank: int, begin: int, value: int) -> Fetched:
        return Found(kernels.words.fetch_add(self._words[rank], self._front + begin // WORD, value))

    def _compare_swap(self, rank: int, begin: int, expected: int, value: int) -> Fetched:
        return Found(kernels.words.compare_swap(self._words[rank], self._front + begin // WORD, expected, value))

    def _signal(self, rank: int, flag: int, number: int) -> Request:
        kernels.words.put_word(self._words[rank], flag, number)
        return OVER

    def Free(self) -> None:
        if not self.freed:
            self.freed = True
            self._words, self._regions = [], []
            self._shared.Free()
