"""Choose what carries remote memory: shared memory on one host, verbs where there is an RDMA device, else MPI."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from mpiddl.errors import ShapeError, UsageError
from mpiddl.remote_memory.base import RemoteMemory
from mpiddl.remote_memory.mpi_window import MpiWindow
from mpiddl.remote_memory.node_memory import NodeMemory
from mpiddl.remote_memory.verbs_memory import VerbsMemory
from mpiddl.remote_memory.virtual_memory import VirtualMemory
from mpiddl.transport.agree import agreed, check_equal
from mpiddl.transport.comm import Comm
from mpiddl.transport.virtual import VirtualTransport
from mpiddl.tuning.verbs import over_verbs, works

KINDS = ("auto", "shared", "verbs", "mpi")


def allocate(comm: Comm, nbytes: int, flags: int = 0, kind: str = "auto") -> RemoteMemory:
    """A region of ``nbytes`` on this rank, and ``flags``; all zero.

    Parameters
    ----------
    comm : Comm
    nbytes : int
        Of this rank's region; ranks may give different numbers.
    flags : int
        Number of flags; the same on all ranks.
    kind : str
        shared, verbs, mpi, or auto: shared memory if all ranks are on one host, else verbs if they work, else MPI.

    Raises
    ------
    ShapeError, UsageError
        ``nbytes``, ``flags`` or ``kind`` make no sense.
    TransportError, SharedMemoryError
        On all ranks: what is asked for does not work here.

    Communication
    -------------
    Collective.
    """
    with agreed(comm):
        for name, number in (("nbytes", nbytes), ("flags", flags)):
            if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < 0:
                raise ShapeError(f"{name}: got {number!r}, expected a whole number, 0 or more")
        if nbytes > (most := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
            raise ShapeError(f"nbytes: got {nbytes}, expected at most {most}, the memory of this host")
        _check_kind(kind, KINDS)
    check_equal(comm, "allocate", {"flags": int(flags), "kind": kind})
    nbytes, flags = int(nbytes), int(flags)
    if isinstance(comm.transport, VirtualTransport) and kind in ("auto", "shared"):
        return VirtualMemory(comm, nbytes, flags)
    if kind == "shared" or (kind == "auto" and len(set(comm.nodes())) == 1):
        return NodeMemory(comm, nbytes, flags)
    return _between_nodes(comm, nbytes, flags, kind)


def expose(comm: Comm, array: np.ndarray, kind: str = "auto") -> RemoteMemory:
    """Memory that exists as the region of this rank, without flags; it must live as long. Parameters as `allocate`.

    Parameters
    ----------
    array : ndarray of int64, shape (n,), contiguous
        Ranks may give arrays of different sizes, also empty ones.
    kind : str
        verbs, mpi, or auto: verbs if they work, else MPI.
    """
    with agreed(comm):
        if array.dtype != np.int64 or array.ndim != 1 or not array.flags.c_contiguous or not array.flags.writeable:
            raise ShapeError(f"array: got shape {array.shape} of {array.dtype}{', read-only' * (not array.flags.writeable)}, "
                             "expected a contiguous array of int64 of one axis that can be written")
        _check_kind(kind, ("auto", "verbs", "mpi"))
    check_equal(comm, "expose", {"kind": kind})
    return _between_nodes(comm, array.nbytes, 0, kind, array)


def _between_nodes(comm: Comm, nbytes: int, flags: int, kind: str, own: np.ndarray | None = None) -> RemoteMemory:
    if kind == "verbs" or (kind == "auto" and works(comm, aloud=False)):
        return VerbsMemory(over_verbs(comm), nbytes, flags, own)
    return MpiWindow(comm, nbytes, flags, own)


def _check_kind(kind: str, known: Sequence[str]) -> None:
    if kind not in known:
        raise UsageError(f"kind: got {kind!r}, expected {', '.join(known)}")
