"""Memory that the ranks of one node share, and a barrier in it that no message takes part in.

It is a file without a name in the memory file system (/dev/shm): it has one until all ranks have opened it, and is empty so
long. So nothing is left of processes that are killed, and nothing has to be given back in order at the end of a program. MPI's
own windows have to: in MPI_Finalize Open MPI 5.0 frees those that are left in an order that differs between ranks, and hangs.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate, repeat, starmap, takewhile
from operator import not_
from typing import Any

import numpy as np

from mpiddl import kernels
from mpiddl.errors import SharedMemoryError
from mpiddl.memory import ALIGNMENT
from mpiddl.transport.agree import agreed
from mpiddl.transport.base import PATIENCE
from mpiddl.transport.comm import Comm
from mpiddl.transport.memory_file import forget, mapped

WHERE = "/dev/shm"
"""Linux's memory file system; elsewhere files for a moment."""

PREFIX = "mpiddl-"

RESERVED_BYTES = 16 << 20
"""Of shared memory, for the MPI library; half of what is free where that is less."""


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
        Every rank's, in rank order, zero at first; each begins on a page. After `Free` there are none; arrays that were kept
        are then zero, and take no memory until they are touched.
    barrier : tuple
        The arguments by which a kernel meets the other ranks itself (`mpiddl.kernels.node.meet`), but for its patience.

    Raises
    ------
    SharedMemoryError
        On all ranks: the memory file system has not enough room, or ranks have none in common; too many files are open.
    UsageError, OutputError
        On all ranks: kernels cannot be loaded on one of them.

    Communication
    -------------
    Collective over ``comm``: five all-gathers of small objects.
    """

    def __init__(self, comm: Comm, nbytes: int):
        self._comm, self.freed = comm, False
        file, sizes, lengths = _opened_by_all(comm, int(nbytes))
        try:
            starts = [0, *accumulate(lengths)]
            with _agreed(comm, starts[-1]):
                _take(file, starts[comm.rank], lengths[comm.rank], starts[-1])
            with _agreed(comm, starts[-1]):
                whole = mapped(file, starts[-1])
        finally:
            os.close(file)
        self._own: np.ndarray | None = whole[starts[comm.rank] :][: lengths[comm.rank]]
        self.segments = [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        behind = -(-sizes[0] // ALIGNMENT) * ALIGNMENT
        raised = whole[behind : behind + _flags_bytes(comm)].view(np.int64)
        self.barrier: tuple[Any, ...] = raised, np.zeros(5, np.int64), comm.rank, comm.size

    def meet(self) -> KernelRequest:
        """A barrier; what any rank wrote before it, all see after it."""
        return KernelRequest(self._comm, kernels.meet.meet, self.barrier)

    def Free(self) -> None:
        """Collective: a barrier. Arrays that are kept nevertheless are harmless."""
        if not self.freed:
            self.freed = True
            self.segments, self.barrier = [], ()
            try:
                self._comm.Barrier()  # nobody reads any more
            finally:  # what a signal's handler raises comes when the barrier is over
                if self._own is not None:
                    forget(self._own)
                self._own = None


class KernelRequest:
    """A kernel that meets the other ranks by itself, as a request. A rank has one at a time in the same memory.

    ``kernel(*arguments, patience)`` says whether it is done; if not, it is called again.
    """

    def __init__(self, comm: Comm, kernel: Callable[..., bool], arguments: tuple[Any, ...]):
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


def run_kernel(comm: Comm, kernel: Callable[..., bool], arguments: tuple[Any, ...], passed: np.ndarray,
               barriers: Callable[[int], int]) -> None:
    """The kernel in one go, without a request: what that costs is more than a short collective takes.

    What a signal's handler raises meanwhile comes when the kernel is done, as `mpiddl.progress.started.Started` has it.

    Parameters
    ----------
    arguments : tuple
        Of the kernel, but for its patience; the first one is an array.
    passed : ndarray
        Begins with the number of barriers that this rank has passed (`mpiddl.kernels.node.meet`).
    barriers : callable
        How many the kernel passes for an array of so many elements.
    """
    before = passed.item(0)
    try:
        while not kernel(*arguments, PATIENCE):
            comm.progress()
    except BaseException:
        end_kernel(comm, kernel, arguments, lambda: passed[0] >= before + barriers(arguments[0].size))
        raise


def end_kernel(comm: Comm, kernel: Callable[..., bool], arguments: tuple[Any, ...], over: Callable[[], bool]) -> None:
    """Go on, until it is ``over``, with a kernel between whose calls a signal's handler has raised; a second one ends it."""
    try:
        while not (over() or kernel(*arguments, PATIENCE)):
            comm.progress()
    except BaseException:
        comm.broken = True
        raise


def _flags_bytes(comm: Comm) -> int:
    """Of the barrier behind the segment of rank 0, on cache lines of their own."""
    return int(8 * kernels.meet.FLAGS * comm.size)


def _opened_by_all(comm: Comm, nbytes: int) -> tuple[int, list[int], list[int]]:
    """A new file without a name, open on every rank of the node, if there is room; and what each rank wants, and takes."""
    file, path = -1, ""
    try:
        with _agreed(comm, nbytes):
            own, flags = -(-nbytes // ALIGNMENT) * ALIGNMENT, _flags_bytes(comm)  # numba may fail to load kernels
            pages = -(-(nbytes if comm.rank else own + flags) // mmap.PAGESIZE) * mmap.PAGESIZE
            if comm.rank == 0:
                path = os.path.join(WHERE if os.path.isdir(WHERE) else tempfile.gettempdir(), PREFIX + secrets.token_hex(8))
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        sizes, lengths, paths = zip(*comm.setup_allgather((nbytes, pages, path)), strict=True)
        with _agreed(comm, sum(lengths)):
            if comm.rank:
                file = os.open(paths[0], os.O_RDWR | os.O_CLOEXEC)
            if (free := _free()) is not None and free - _reserve(free) < sum(lengths):
                raise OSError(errno.ENOSPC, "no room")
    except BaseException:
        if file >= 0:
            os.close(file)
        raise
    finally:
        if path:
            with suppress(OSError):
                os.unlink(path)
    return file, list(sizes), list(lengths)


def _free() -> int | None:
    """Bytes of the memory file system that nobody has; None where there is none, or it has no limit."""
    try:
        found = os.statvfs(WHERE)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _reserve(free: int) -> int:
    """Free bytes that mpiddl does not take. MPI libraries take more during a run, and MPICH crashes where there are none."""
    return min(RESERVED_BYTES, free // 2)


def _take(file: int, start: int, nbytes: int, size: int) -> None:
    """Have this rank's part of a file of ``size`` bytes for certain, near it: what is touched in vain is a bus error."""
    if not hasattr(os, "posix_fallocate"):
        os.truncate(file, size)
    elif nbytes:
        os.posix_fallocate(file, start, nbytes)


@contextmanager
def _agreed(comm: Comm, nbytes: int) -> Iterator[None]:
    """A `SharedMemoryError` on all ranks if what is done in the block has failed on one; ``nbytes`` are wanted in all."""
    with agreed(comm):
        try:
            yield
        except OSError as error:
            raise SharedMemoryError(f"shared memory: {_words(comm, error, nbytes)}") from None


def _words(comm: Comm, failed: OSError, nbytes: int) -> str:
    """What has failed on this rank, and the remedy."""
    number = failed.errno
    if number == errno.ENOSPC:
        room = _free()
        free = f"{WHERE} has less" if room is None else (f"{WHERE}, less {_reserve(room) / 1e6:.1f} MB for the MPI library, "
                                                         f"has only {(room - _reserve(room)) / 1e6:.1f} MB free")
        return (f"{nbytes / 1e6:.1f} MB needed for {comm.size} ranks, but {free}; enlarge it (mount -o remount,size=8G "
                f"{WHERE}, docker run --shm-size 8g) or use a strategy without shared memory")
    if number == errno.ENOENT and comm.rank:
        return (f"rank {comm.rank} of this node does not find the file of rank 0: they have no {WHERE} in common; start the "
                "ranks of a host in one container, or let containers share it (docker run --ipc=host)")
    if number == errno.EMFILE:
        return f"rank {comm.rank} of this node has as many files open as it may; close some, or raise the limit (ulimit -n)"
    return f"rank {comm.rank} of this node: {failed}; use a strategy without shared memory"
