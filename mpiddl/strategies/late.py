"""Sums over all ranks that are on their way while steps are taken: a thread moves them on, memory is used again.

Where there is no such thread they are the MPI library's own, which it moves on in whatever calls it gets.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.collectives import iallreduce
from mpiddl.memory import aligned_zeros
from mpiddl.strategies.base import Pending
from mpiddl.strategies.mover import Mover
from mpiddl.transport.base import IN_PLACE, Comm


class Late:
    """Started sums of arrays of one size and dtype, ``most`` of them at a time; freed with its communicator.

    trouble : why no thread of ours moves them on, or nothing.
    """

    def __init__(self, comm: Comm, size: int, dtype: np.dtype, most: int):
        self._comm, self._mover = comm, Mover(comm)
        self._size, self._dtype, self._most = size, dtype, most
        self._room: list[np.ndarray] = []
        self._next = 0
        self.freed, self.trouble = False, self._mover.trouble

    def start(self, array: np.ndarray) -> Pending:
        """Begin to sum copies of all ranks' ``array``; the one that was started ``most`` sums ago is overwritten."""
        if self._next == len(self._room):  # a run may be shorter than its sums are late
            self._room.append(aligned_zeros(self._size, self._dtype))
        total = self._room[self._next]
        self._next = (self._next + 1) % self._most
        total[:] = array
        if self.trouble:
            return Pending(total, self._comm.Iallreduce(IN_PLACE, total))
        request = iallreduce(self._comm, IN_PLACE, total)
        if self._comm.size > 1:
            self._mover.on(request)
        return Pending(total, request)

    def move_on(self) -> None:
        """Between two parts of a gradient: where no thread does it, the library moves on what is under way."""
        if self.trouble:
            self._comm.progress()

    def wait(self, sum: Pending) -> np.ndarray:
        """What ``sum`` is when it is complete; it is no longer needed when the next one starts."""
        self._mover.rest()
        total = sum.wait()
        self._mover.wake()
        return total

    def stop(self) -> None:
        """End the thread; the next sum would start another."""
        self._mover.stop()

    def Free(self) -> None:
        """Local."""
        self.freed = True
        self.stop()


def late(comm: Comm, owner: Any, size: int, dtype: np.dtype, most: int) -> Late:
    """The sums of ``owner`` on ``comm``; made at the first call."""
    return comm.kept((owner, "late", size, dtype), lambda: Late(comm, size, dtype, most))
