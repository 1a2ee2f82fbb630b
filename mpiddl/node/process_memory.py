"""Whether the ranks of a node may read each other's memory, found out by doing it.

Linux lets a process read another's (`process_vm_readv`, "cross memory attach") if both belong to one user and nothing forbids
it: containers of their own, a seccomp filter, Yama's ptrace_scope (MPI libraries may lift that one for their processes).
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys

import numpy as np

from mpiddl.node.topology import neighbours
from mpiddl.transport.comm import Comm

TOKEN_BYTES = 16


class _Vector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def processes(local: Comm) -> np.ndarray | None:
    """Process numbers of the ranks of one node, int32, shape (size,), if each of them can read all others' memory; else None.

    A number says nothing where ranks have numbers of their own (containers), so each rank looks for what the other one
    has just made up.

    Communication
    -------------
    Collective over ``local``, the ranks of one node: two all-gathers at the first time, none afterwards.
    """
    return local.kept("processes", lambda: _find(local))


def readable(comm: Comm) -> np.ndarray | None:
    """`processes` of all ranks, if they are on one node and may read each other's memory; else None. Collective at first."""
    local = neighbours(comm).local
    return processes(local) if 1 < local.size == comm.size else None


def _find(local: Comm) -> np.ndarray | None:
    token = np.frombuffer(secrets.token_bytes(TOKEN_BYTES), np.uint8)
    told = local.setup_allgather((os.getpid(), token.ctypes.data, token.tobytes()))
    # The second all-gather also keeps every token where it is until all have looked.
    seen = local.setup_allgather(all(_read(process, address) == wanted for process, address, wanted in told))
    return np.array([process for process, _, _ in told], np.int32) if all(seen) else None


def _read(process: int, address: int) -> bytes | None:
    """So many bytes of a process, if they can be had."""
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None).process_vm_readv
    call.restype = ctypes.c_ssize_t
    found = ctypes.create_string_buffer(TOKEN_BYTES)
    here = _Vector(ctypes.addressof(found), TOKEN_BYTES)
    there = _Vector(address, TOKEN_BYTES)
    count = ctypes.c_ulong(1)
    came = call(ctypes.c_int(process), ctypes.byref(here), count, ctypes.byref(there), count, ctypes.c_ulong(0))
    return found.raw if came == TOKEN_BYTES else None
