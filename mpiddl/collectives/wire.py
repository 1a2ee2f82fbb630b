"""The wire of a communicator: its ranks once more, for the messages of collectives only, and memory that is used again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.memory import aligned_zeros
from mpiddl.transport.comm import Comm
from mpiddl.tuning.verbs import over_verbs, works

MPI, VERBS = TRANSPORTS = ("mpi", "verbs")
"""What carries messages between nodes."""

def check_transport(name: str, value: Any) -> None:
    """Raise a `UsageError`, which begins with ``name``, for anything but mpi and verbs."""
    if value not in TRANSPORTS:
        raise UsageError(f"{name}: got {value!r}, expected {' or '.join(TRANSPORTS)}")


TAGS = 32768  # every library has as many

LARGEST = 2**31 - 1
"""Elements of one message that every MPI library takes."""

SEGMENT_BYTES = {"Open MPI": 60 * 1024, "": 128 * 1024}
"""Of a pipelined message, by what a library calls itself, at last any. Larger ones cost fewer calls. Over TCP, Open MPI sends
up to 64 KiB at once, and asks before it sends more: questions and answers then wait behind what links have still to carry."""


class Wire:
    """Where collectives send.

    Attributes
    ----------
    comm : Comm
        A duplicate: no message of a collective can be taken for one of the user's.
    segment_bytes : int
        Of a pipelined message.
    """

    def __init__(self, comm: Comm):
        self.comm, library = comm, comm.library()
        self.segment_bytes = next(nbytes for name, nbytes in SEGMENT_BYTES.items() if library.startswith(name))
        self._calls = 0
        self._idle: list[np.ndarray] = []
        self._lock = threading.Lock()  # a progress thread may be in the middle of another collective

    def tag(self) -> int:
        """For the next collective: all ranks start them in the same order, so their numbers agree."""
        with self._lock:
            self._calls += 1
            return self._calls % TAGS

    @contextmanager
    def scratch(self, size: int, dtype: np.dtype) -> Iterator[np.ndarray]:
        """Memory for a while; fresh pages would cost as much as filling them."""
        nbytes = size * dtype.itemsize
        with self._lock:
            fits = [block for block in self._idle if block.nbytes >= nbytes]
            block = min(fits, key=len) if fits else aligned_zeros(nbytes, np.uint8)
            self._idle = [other for other in self._idle if other is not block and (fits or other.nbytes > nbytes)]
        try:
            yield block[:nbytes].view(dtype)
        finally:
            self._idle.append(block)


def new_wire(comm: Comm, transport: str = MPI) -> Wire:
    """A wire of these ranks, freed with ``comm`` at the latest; over MPI also where verbs are asked for and do not work.

    Collective; then rank 0 prints a warning.
    """
    if transport == VERBS and comm.size > 1 and works(comm):
        comm = over_verbs(comm)
    return Wire(comm.Create(range(comm.size)))


def wire(comm: Comm) -> Wire:
    """The wire of ``comm``, in rank order; collective at the first call."""
    return comm.kept("wire", lambda: new_wire(comm))
