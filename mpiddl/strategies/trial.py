"""Whether ranks can work on one memory: tried at the start of a run, before anything depends on it.

Every rank of a node changes the same words some times, under their lock: it adds one and stamps all others as its own; and
copies them in between. Then there are as many changes as were made, and no copy held two stamps. Cost: a few milliseconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.errors import CommError
from mpiddl.topology import neighbours
from mpiddl.transport.guard import Guard

TIMES, SIZE = 25, 512
"""Changes by each rank, and the words of each: more than fits into a cache line, little enough for a cache."""

LIMIT_S = 20.0
"""After which a lock is called broken: a hundred ranks that share a core take their turns in less."""


def trouble(comm: Any) -> str:
    """Why the ranks of ``comm`` cannot work on one memory; nothing if they can. The same on every rank.

    Communication
    -------------
    Collective: shared memory on each node, two all-gathers.
    """
    if not comm.processes:
        return "virtual ranks take turns"
    near = neighbours(comm)
    if len(near.topology.nodes) > 1:
        return f"the ranks are on {len(near.topology.nodes)} nodes"
    found = comm.allgather(_compiled(near.local) or _tried(near.local))
    return next(filter(None, found), "")


def _compiled(local: Any) -> str:
    """The kernels, by one rank of a node first; the others find them in numba's cache."""
    if local.rank == 0:
        _change(Guard(local, np.zeros(Guard.WORDS, np.int64)), np.zeros(SIZE, np.int64), 0, 1)
    local.patient_barrier()
    return ""


def _tried(local: Any) -> str:
    """What is wrong on this node, as this rank sees it."""
    try:
        memory = local.share(8 * (Guard.WORDS + SIZE) if local.rank == 0 else 0)
    except Exception as error:  # of ours, or of whichever MPI library
        return f"a node has no shared memory ({error})"
    words = memory.segments[0].view(np.int64)
    guard, data, torn, failure = Guard(local, words[: Guard.WORDS], LIMIT_S), words[Guard.WORDS :], 0, ""
    try:
        torn = _change(guard, data, local.rank + 1, TIMES)
    except CommError as error:
        failure = str(error)
    local.Barrier()
    made, counted, wanted = guard.changes, int(data[0]), TIMES * local.size
    memory.Free()
    if torn or not made == counted == wanted:
        failure = failure or f"{wanted} changes left {made} and {counted}, {torn} copies were torn"
    return f"shared memory failed its trial: {failure}" if failure else ""


def _change(guard: Guard, data: np.ndarray, stamp: int, times: int) -> int:
    """Change and copy; returns how many copies held two stamps."""
    copy, torn = np.empty_like(data), 0
    for _ in range(times):
        with guard.changing():
            data[0] += 1
            data[1:] = stamp
        guard.copy(data, copy)
        torn += bool((copy[1:] != copy[1]).any())
    return torn
