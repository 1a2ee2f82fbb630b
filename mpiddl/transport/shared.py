"""Memory that the ranks of one node share, through an MPI window, and a barrier in it that no message takes part in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import repeat, starmap, takewhile
from operator import not_
from typing import Any

import numpy as np

from mpiddl.errors import CommError
from mpiddl.kernels.meet import FLAGS, meet
from mpiddl.memory import ALIGNMENT
from mpiddl.transport.base import PATIENCE

WHERE = "/dev/shm"  # both libraries keep their segments there


MOST_WINDOWS = 1500
"""MPICH has 2,048 contexts, of which each window takes one, and a segmentation fault instead of one more."""


class SharedMemory:
    """One segment a rank, all of them open to every rank of the node.

    Parameters
    ----------
    comm : MpiComm
        Ranks of one node.
    nbytes : int
        Size of this rank's own segment; ranks may differ.

    Attributes
    ----------
    segments : list of ndarray of uint8
        Every rank's, in rank order, zero at first; each begins on a cache line. Gone after `Free`.
    barrier : tuple
        The arguments by which a kernel meets the other ranks itself (`mpiddl.kernels.meet`), but for its patience.

    Raises
    ------
    CommError
        On all ranks: the node's memory file system has not enough room.

    Communication
    -------------
    Collective over ``comm``: an all-gather, the allocation and a barrier.
    """

    live = 0
    """Windows of this process."""

    def __init__(self, comm: Any, nbytes: int):
        if SharedMemory.live >= MOST_WINDOWS:
            raise CommError(f"shared memory: {SharedMemory.live} pieces are in use, which is as many as MPI libraries bear; "
                            "Free() those (a TwoStep has two) that are not needed any more")
        SharedMemory.live += 1
        self._comm, self._mpi, self.freed = comm, comm._mpi, False
        sizes = comm.allgather(int(nbytes))
        flags = ALIGNMENT + 8 * FLAGS * comm.size  # on cache lines of their own
        _check_room(comm, sum(sizes) + flags)
        info = self._mpi.Info.Create({"alloc_shared_noncontig": "true"})  # every segment near its owner
        mine = sizes[comm.rank] + ALIGNMENT + (flags if comm.rank == 0 else 0)
        self._window = self._mpi.Win.Allocate_shared(mine, 1, info, comm.raw)
        info.Free()
        self._window.Lock_all()  # one epoch from first to last: plain loads and stores, ordered by `meet`
        parts = [np.frombuffer(self._window.Shared_query(rank)[0], np.uint8) for rank in range(comm.size)]
        starts = [-part.ctypes.data % ALIGNMENT for part in parts]
        self.segments = [part[start : start + size] for part, start, size in zip(parts, starts, sizes, strict=True)]
        behind = starts[0] + -(-sizes[0] // ALIGNMENT) * ALIGNMENT
        raised = parts[0][behind : behind + flags - ALIGNMENT].view(np.int64)
        self.barrier: tuple[Any, ...] = raised, np.zeros(5, np.int64), comm.rank, comm.size
        self.segments[comm.rank][:] = 0  # by the owner: a page lies where it was first written
        if comm.rank == 0:
            raised[:] = 0
        comm.raw.Barrier()

    def meet(self) -> KernelRequest:
        """A barrier; what any rank wrote before it, all see after it."""
        return KernelRequest(self._comm, meet, self.barrier)

    def Free(self) -> None:
        """Collective; the segments must not be touched afterwards."""
        if not self.freed:
            self.freed = True
            SharedMemory.live -= 1
            self.segments, self.barrier = [], ()
            self._window.Unlock_all()
            self._window.Free()


class KernelRequest:
    """A kernel that meets the other ranks by itself, as a request. A rank has one at a time in the same memory.

    ``kernel(*arguments, patience)`` says whether it is done; if not, it is called again.
    """

    def __init__(self, comm: Any, kernel: Callable[..., bool], arguments: tuple[Any, ...]):
        self._comm, self._call = comm, [*arguments, 0]
        # That it is done is known here before any signal's handler can raise an exception: the kernel is not called once more.
        self._rounds: Iterator[bool] = takewhile(not_, starmap(kernel, repeat(self._call)))

    def Wait(self) -> None:
        self._call[-1] = PATIENCE
        for _ in self._rounds:
            self._comm.progress()  # a neighbour may wait for a message that our library has not sent to the end

    def Test(self) -> bool:
        self._call[-1] = 0
        return next(self._rounds, True)


def end_kernel(comm: Any, kernel: Callable[..., bool], arguments: tuple[Any, ...], over: Callable[[], bool]) -> None:
    """Go on, until it is ``over``, with a kernel between whose calls a signal's handler has raised; a second exception ends it.

    For those that call a kernel without a request, and hold back what is raised as `mpiddl.collectives.base.Started` does.
    """
    try:
        while not (over() or kernel(*arguments, PATIENCE)):
            comm.progress()
    except BaseException:
        comm.broken = True
        raise


def _check_room(comm: Any, nbytes: int) -> None:
    """Refuse what would end in a bus error when it is touched."""
    try:
        found = os.statvfs(WHERE)
    except OSError:
        free = nbytes  # a system without it: the library knows where it puts its segments
    else:
        free = found.f_bavail * found.f_frsize
    free = min(comm.allgather(free))
    if nbytes > free:
        raise CommError(
            f"shared memory: {nbytes / 1e6:.1f} MB wanted for {comm.size} ranks, {WHERE} has {free / 1e6:.1f} MB free; "
            f"enlarge it (mount -o remount,size=8G {WHERE}, docker run --shm-size 8g) or take a strategy without shared memory"
        )
