"""The wire of a communicator: its ranks once more, for the messages of collectives only, and memory that is used again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from mpiddl.memory import aligned_zeros
from mpiddl.transport.comm import Comm

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


def wire(comm: Comm) -> Wire:
    """The wire of ``comm``, in rank order; collective at the first call."""
    return comm.kept("wire", lambda: Wire(comm.Create(range(comm.size))))
