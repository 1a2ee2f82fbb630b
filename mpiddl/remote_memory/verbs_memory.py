"""Remote memory over verbs: each region is registered once, and its address and key are exchanged once.

A write is one work request, and so is a flag behind it: the device carries out what goes to one rank in order. No rank is
asked, and nothing is copied.

Cost: a write is one message of its bytes; a flag is a message of 8 bytes, sent inline; a fetch or a swap is a message and an
answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.memory import aligned_zeros
from mpiddl.remote_memory.base import WORD, Fetched, RemoteMemory, whole_number
from mpiddl.transport.agree import agreed
from mpiddl.transport.base import Request
from mpiddl.transport.comm import Over
from mpiddl.transport.verbs.operations import Operation
from mpiddl.transport.verbs.transport import VerbsComm
from mpiddl.transport.verbs.work_requests import Kind, Memory, WorkRequest

OVER = Over()

FOUND = 512
"""Words for the results of atomic operations that are registered together."""


class VerbsMemory(RemoteMemory):
    """See `RemoteMemory`.

    messages : of the device that carries it (`mpiddl.transport.verbs.messages.Messages`).
    own : int64 array that exists, in place of new memory.
    """

    kind = "verbs"

    def __init__(self, comm: VerbsComm, nbytes: int, flags: int, own: np.ndarray | None = None):
        super().__init__(comm, nbytes, flags)
        self.messages = comm.messages
        self._lay(aligned_zeros(self._words_of(nbytes), np.int64) if own is None else own)
        with agreed(comm):
            mine = self.messages.registrations.hold(self._own)
        self._regions: list[Memory] = comm.setup_allgather(mine)
        self._prepared: dict[tuple[int, int], tuple[Any, np.ndarray]] = {}
        self._found, self._next = np.empty(0, np.int64), 0

    def _write(self, rank: int, begin: int, data: np.ndarray) -> Request:
        return self._start(rank, Kind.WRITE, data, WORD * self._front + begin)

    def _read(self, rank: int, begin: int, data: np.ndarray) -> Request:
        return self._start(rank, Kind.READ, data, WORD * self._front + begin)

    def _fetch_add(self, rank: int, begin: int, value: int) -> Fetched:
        return self._change(rank, begin, Kind.FETCH_ADD, value, 0)

    def _compare_swap(self, rank: int, begin: int, expected: int, value: int) -> Fetched:
        return self._change(rank, begin, Kind.COMPARE_SWAP, expected, value)

    def _change(self, rank: int, begin: int, kind: Kind, *values: int) -> Fetched:
        if self._next == self._found.size:  # the words that are in use keep their array alive
            self._found, self._next = aligned_zeros(FOUND, np.int64), 0
        self._next += 1
        found = self._found[self._next - 1 : self._next]
        first, second = (value % 2**64 for value in values)
        return FetchedWord(self._start(rank, kind, found.view(np.uint8), WORD * self._front + begin, (first, second)), found)

    def signal(self, rank: int, flag: int, number: int) -> Request:
        """The first time, a work request is prepared; then only the number is written into it. It is sent inline."""
        prepared = self._prepared.get((rank, flag))
        if prepared is None:
            return super().signal(rank, flag, number)
        request, word = prepared
        operations = self.messages.operations
        self.messages.device.check_process()
        with operations.lock:
            word[0] = whole_number("number", number)
            if operations.post_again(rank, request):
                if operations.queues[rank].signal == operations.queues[rank].posted:
                    operations.progress()  # the queue is emptied before it is full
                return OVER
        return super().signal(rank, flag, number)

    def _prepare(self, rank: int, flag: int) -> None:
        word = np.zeros(1, np.int64)
        request = WorkRequest(0, Kind.WRITE, Memory(word.ctypes.data, WORD, 0), self._regions[rank].part(WORD * flag, WORD),
                              inline=True)
        self._prepared[rank, flag] = self.messages.device.prepare(rank, request), word

    def _signal(self, rank: int, flag: int, number: int) -> Request:
        if (rank, flag) not in self._prepared and self.messages.device.inline >= WORD:
            self._prepare(rank, flag)
        return self._start(rank, Kind.WRITE, np.array([number], np.int64).view(np.uint8), WORD * flag)

    def _start(self, rank: int, kind: Kind, data: np.ndarray, at: int, values: tuple[int, int] = (0, 0)) -> Operation:
        messages = self.messages
        if kind is Kind.WRITE and data.size <= messages.device.inline:
            local = Memory(data.ctypes.data, data.size, 0)
        else:
            local = messages.registrations.local(data)
        remote = self._regions[rank].part(at, data.size)
        return messages.operations.start(rank, kind, local, remote, values=values, holds=data)

    def progress(self) -> None:
        self.messages.progress()
        self.messages.check()

    def register(self, array: np.ndarray) -> None:
        super().register(array)
        self.messages.registrations.local(array)

    def Free(self) -> None:
        if not self.freed:
            self.messages.operations.drain()  # no rank writes to memory that its owner has freed
            self.freed = True
            for prepared, _ in self._prepared.values():
                self.messages.device.release(prepared)
            self._prepared.clear()
            self.comm.Barrier()
            self.messages.registrations.release(self._own)


class FetchedWord:
    """An atomic operation under way (`Fetched`)."""

    def __init__(self, operation: Operation, found: np.ndarray):
        self.Wait, self.Test, self._found = operation.Wait, operation.Test, found

    @property
    def value(self) -> int:
        return self._found.item()
