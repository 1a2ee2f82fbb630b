"""A remote machine as a device with memory: what all kinds of remote memory have in common.

Each rank gives a region of bytes, which all ranks of the communicator may write and read. It also has *flags*: 8-byte numbers
that count up. A rank that has written something sets a flag of the receiver. When the receiver sees the flag, what was written
before is there. A flag is a sequence number, not 0 or 1: so no two uses can be taken for each other, and nothing is reset.

::

    memory = allocate(comm, nbytes=x.nbytes, flags=1)
    memory.write(right, 0, x)            # into the region of that rank
    memory.signal(right, 0, step)        # its flag 0 is `step` from then on
    memory.arrived(0, step).Wait()       # what the left neighbour has written is in memory.local

Source: Xue et al., Fast distributed deep learning over RDMA, EuroSys 2019, arXiv:1805.08430, sections 3.1 and 3.2. Ours: flags
that count, and the same interface over shared memory and MPI.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np

from mpiddl import kernels
from mpiddl.errors import ShapeError, UsageError
from mpiddl.layout import ceil_div
from mpiddl.memory import ALIGNMENT
from mpiddl.transport import comm as communicator
from mpiddl.transport.base import PATIENCE, Request

WORD = 8
"""Bytes of a flag, and of what `fetch_add` and `compare_swap` change."""

MOST = 2**63 - 1
"""The largest value of one."""


class Fetched(Request, Protocol):
    """A request with a ``value`` when it is complete: the number that was there before."""

    @property
    def value(self) -> int: ...


class RemoteMemory(ABC):
    """The regions of all ranks of a communicator; made by `mpiddl.remote_memory.allocate`.

    Attributes
    ----------
    kind : str
        What carries it: "shared memory", "MPI", "verbs" or "virtual".
    rank, size : int
        Of the communicator.
    local : ndarray of uint8
        This rank's region. Others write it: what they wrote is sure to be there when a flag says so.
    sizes : list of int
        Bytes of each rank's region.
    flags : int
        Number of flags of each rank.

    Raises
    ------
    UsageError, ShapeError
        By all functions: a rank, flag or part of a region that there is not; an array that is not contiguous or not writable.
    """

    kind: str

    def __init__(self, comm: communicator.Comm, nbytes: int, flags: int):
        self.rank, self.size, self.flags, self.comm = comm.rank, comm.size, flags, comm
        self.sizes, self.freed = comm.setup_allgather(nbytes), False
        self._signalled: set[tuple[int, int]] = set()  # flags that were checked
        self._front = ceil_div(WORD * flags, ALIGNMENT) * ALIGNMENT // WORD

    def _lay(self, words: np.ndarray) -> None:
        """This rank's memory, ``words_of`` words of int64: its flags, and from a cache line of its own on its region."""
        self._own = words
        self.local = words[self._front :].view(np.uint8)[: self.sizes[self.rank]]

    def _words_of(self, nbytes: int) -> int:
        return self._front + ceil_div(nbytes, WORD)

    def write(self, rank: int, begin: int, source: np.ndarray) -> Request:
        """Write a contiguous array to the region of ``rank``, from byte ``begin``. Complete: ``source`` may be changed."""
        data = _bytes_of("source", source)
        self._check(rank, begin, data.size)
        return self._write(rank, begin, data)

    def read(self, rank: int, begin: int, into: np.ndarray) -> Request:
        """Read the region of ``rank``, from byte ``begin``, into a contiguous array."""
        data = _bytes_of("into", into)
        if not into.flags.writeable:
            raise UsageError("into: got a read-only array, expected one that can be written")
        self._check(rank, begin, data.size)
        return self._read(rank, begin, data)

    def fetch_add(self, rank: int, begin: int, value: int) -> Fetched:
        """Add to the int64 at byte ``begin``, a multiple of 8, in one step. Also for the own region."""
        self._check_word(rank, begin)
        return self._fetch_add(rank, begin, whole_number("value", value))

    def compare_swap(self, rank: int, begin: int, expected: int, value: int) -> Fetched:
        """Replace the int64 at byte ``begin``, a multiple of 8, if it is ``expected``. Also for the own region."""
        self._check_word(rank, begin)
        return self._compare_swap(rank, begin, whole_number("expected", expected), whole_number("value", value))

    def signal(self, rank: int, flag: int, number: int) -> Request:
        """Set a flag of ``rank``. What this rank has written to it before is there when the flag is seen."""
        if (rank, flag) not in self._signalled or self.freed or self.comm.freed:
            self._check(rank, 0, 0)
            self._check_flag(flag)
            self._signalled.add((rank, flag))
        return self._signal(rank, flag, whole_number("number", number))

    def arrived(self, flag: int, least: int) -> Request:
        """A request that is complete when this rank's ``flag`` is ``least`` or more."""
        self.check_open()
        self._check_flag(flag)
        return self._arrived(flag, whole_number("least", least))

    def register(self, array: np.ndarray) -> None:
        """Prepare an array that is written from or read into again and again. Not needed, but the first use is faster then."""
        _bytes_of("array", array)

    @abstractmethod
    def Free(self) -> None:
        """Give the memory back, on all ranks. Arrays over ``local`` must not be touched afterwards. Collective."""

    # What each kind does, with arguments that are checked. Arrays are 1-D and of uint8.

    @abstractmethod
    def _write(self, rank: int, begin: int, data: np.ndarray) -> Request: ...

    @abstractmethod
    def _read(self, rank: int, begin: int, data: np.ndarray) -> Request: ...

    @abstractmethod
    def _fetch_add(self, rank: int, begin: int, value: int) -> Fetched: ...

    @abstractmethod
    def _compare_swap(self, rank: int, begin: int, expected: int, value: int) -> Fetched: ...

    @abstractmethod
    def _signal(self, rank: int, flag: int, number: int) -> Request: ...

    def _arrived(self, flag: int, least: int) -> Request:
        return Awaited(self, self._own, flag, least)

    def progress(self) -> None:
        """Called by a rank that waits for a flag, from time to time."""
        self.comm.progress()

    def check_open(self) -> None:
        if self.freed or self.comm.freed:
            raise UsageError("remote memory: got memory after Free(), expected memory that was not freed")

    def _check(self, rank: int, begin: int, nbytes: int) -> None:
        """Raise a `UsageError` unless these bytes are in the region of ``rank``."""
        self.check_open()
        if not 0 <= whole_number("rank", rank) < self.size:
            raise UsageError(f"rank: got {rank}, expected 0 to {self.size - 1}")
        if whole_number("begin", begin) < 0 or begin + nbytes > self.sizes[rank]:
            raise UsageError(f"begin: got bytes {begin} to {begin + nbytes}, expected bytes within the {self.sizes[rank]} of "
                             f"rank {rank}")

    def _check_word(self, rank: int, begin: int) -> None:
        if begin % WORD:
            raise UsageError(f"begin: got byte {begin}, expected a multiple of {WORD}")
        self._check(rank, begin, WORD)

    def _check_flag(self, flag: int) -> None:
        if not 0 <= whole_number("flag", flag) < self.flags:
            raise UsageError(f"flag: got {flag}, expected 0 to {self.flags - 1}" if self.flags else
                             f"flag: got {flag}, expected memory that was allocated with flags")


def whole_number(name: str, value: int) -> int:
    """A whole number that fits into 8 bytes."""
    if type(value) is int and -MOST - 1 <= value <= MOST:  # the usual case, in a tenth of a microsecond
        return value
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not -MOST - 1 <= value <= MOST:
        raise UsageError(f"{name}: got {value!r}, expected a whole number from -2^63 to 2^63 - 1")
    return int(value)


def _bytes_of(name: str, array: np.ndarray) -> np.ndarray:
    """The bytes of a contiguous array, in its memory."""
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        got = f"an array of {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ShapeError(f"{name}: got {got}, expected a numpy array of numbers")
    if not array.flags.c_contiguous:
        raise ShapeError(f"{name}: got an array that is not contiguous, expected a contiguous one")
    return array if array.ndim == 1 and array.dtype == np.uint8 else array.reshape(-1).view(np.uint8)


class Awaited:
    """A flag in memory that others write; a request."""

    def __init__(self, memory: RemoteMemory, words: np.ndarray, flag: int, least: int):
        self._memory, self._awaited = memory, (words, flag, least)

    def Test(self) -> bool:
        self._memory.check_open()
        self._memory.progress()
        return bool(kernels.words.await_word(*self._awaited, 0))

    def Wait(self) -> None:
        self._memory.check_open()
        while not kernels.words.await_word(*self._awaited, PATIENCE):
            self._memory.progress()


class Found(communicator.Over):
    """A request that is complete, and the number that was there before."""

    def __init__(self, value: int):
        self.value = value
