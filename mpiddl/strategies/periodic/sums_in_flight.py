"""All-reduces in flight across training steps. A progress thread advances them; buffers are recycled.

Without a progress thread the all-reduces are those of the MPI library, which advances them during its calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.collectives import iallreduce
from mpiddl.memory import aligned_zeros
from mpiddl.progress.thread import Progress
from mpiddl.strategies.base import Pending
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm
from mpiddl.transport.meter import booked


class Late:
    """All-reduces in flight of arrays of one size and dtype, at most ``most`` at a time; freed with its communicator.

    trouble : the reason why there is no progress thread, or "".
    """

    def __init__(self, comm: Comm, size: int, dtype: np.dtype, most: int):
        self._comm, self._thread = comm, Progress(comm)
        self._size, self._dtype, self._most = size, dtype, most
        self._room: list[np.ndarray] = []
        self._next = 0
        self.freed, self.trouble = False, self._thread.trouble

    def start(self, array: np.ndarray) -> Pending:
        """Start the sum of all ranks' ``array``, in a copy. Overwrites the sum started ``most`` calls ago."""
        if self._next == len(self._room):  # allocated on demand: a run may be shorter than the delay
            self._room.append(aligned_zeros(self._size, self._dtype))
        total = self._room[self._next]
        self._next = (self._next + 1) % self._most
        total[:] = array
        if self.trouble:
            return Pending(total, self._comm.Iallreduce(IN_PLACE, total))
        request = iallreduce(self._comm, IN_PLACE, total)
        if self._comm.size > 1:
            self._thread.on(request)
        return Pending(total, request)

    def move_on(self) -> None:
        """Called between two parts of a gradient: advances the sums if there is no progress thread."""
        if self.trouble:
            with booked(self._comm, "moving"):
                self._comm.progress()

    def wait(self, sum: Pending) -> np.ndarray:
        """Wait for ``sum`` and return its array, which stays valid until the next `start`."""
        self._thread.rest()
        total = sum.wait()
        self._thread.wake()
        return total

    def stop(self) -> None:
        """Stop the progress thread. The next sum starts a new one."""
        self._thread.Free()

    def Free(self) -> None:
        """Local."""
        self.freed = True
        self.stop()


def late(comm: Comm, owner: Any, size: int, dtype: np.dtype, most: int) -> Late:
    """The all-reduces of ``owner`` on ``comm``; created at the first call."""
    return comm.kept((owner, "late", size, dtype), lambda: Late(comm, size, dtype, most))
