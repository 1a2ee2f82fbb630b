"""Trial of shared memory at the start of a run with a one-sided parameter server.

Every rank of a node changes the same words several times under their lock: it adds one to a counter, writes its stamp into all
other words, and copies them in between. The trial succeeds if the counter is correct and no copy holds two different stamps.
With several nodes the same is tried through the serving threads. Cost: a few milliseconds, and one millisecond per rank between
nodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.errors import CommError
from mpiddl.node.guard import Guard
from mpiddl.node.topology import neighbours
from mpiddl.strategies.base import Replica
from mpiddl.strategies.server.push import Push
from mpiddl.strategies.server.rule import Rule
from mpiddl.strategies.server.shards import Store
from mpiddl.transport.comm import Comm

TIMES, SIZE = 25, 512
"""Changes by each rank, and words per change: more than a cache line, less than a cache."""

LIMIT_S = 60.0
"""Seconds after which a lock counts as broken. A hundred ranks on one core need less."""


def trouble(comm: Comm) -> str:
    """The reason why one-sided communication does not work on ``comm``, or "". The same on every rank.

    Communication
    -------------
    Collective: shared memory on each node, two all-gathers.
    """
    if not comm.processes:
        return "virtual ranks take turns"
    near = neighbours(comm)
    _compile(near.local)
    found = next(filter(None, comm.setup_allgather(_on_node(near.local))), "")
    if found or len(near.topology.nodes) == 1:
        return found
    try:
        comm.check_threads()
    except CommError as error:
        return str(error)
    return next(filter(None, comm.setup_allgather(_between_nodes(comm))), "")


def _compile(local: Comm) -> None:
    """Compile the kernels on one rank of each node; the others load them from numba's cache."""
    if local.rank == 0:
        _change(Guard(local, np.zeros(Guard.WORDS, np.int64)), np.zeros(SIZE, np.int64), 0, 1)
    local.patient_barrier()


def _on_node(local: Comm) -> str:
    """The problem on this node, as seen by this rank, or ""."""
    try:
        memory = local.share(8 * (Guard.WORDS + SIZE) if local.rank == 0 else 0)
    except Exception as error:  # of mpiddl or of the MPI library
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


def _between_nodes(comm: Comm) -> str:
    """The problem with serving threads, or "". Every rank serves a shard and stamps all shards."""

    replica = Replica(np.zeros(SIZE * comm.size), {}, rate=lambda steps: 0.0)
    store = Store(comm, _Stamps(comm.size), replica, limit_s=LIMIT_S)
    counts, torn, failure = [0] * comm.size, 0, ""
    try:
        for _ in range(TIMES):
            for turn in range(comm.size):
                number = (comm.rank + turn) % comm.size
                part = replica.params[slice(*store.spans[number])]
                store.shards[number].push(np.full(SIZE, comm.rank + 1.0), part, comm.rank, 0, 0, {}, np.empty(0))()
                store.shards[number].pull(part)()
                torn += bool((part != part[0]).any())
        comm.patient_barrier()
        counts = [shard.pull(replica.params[slice(*span)])() for shard, span in zip(store.shards, store.spans, strict=True)]
    except CommError as error:
        failure = str(error)
    comm.patient_barrier()
    store.Free()
    if torn or set(counts) != {TIMES * comm.size}:
        failure = failure or f"{TIMES * comm.size} pushes left {counts}, {torn} pulls were torn"
    return f"threads that serve other nodes failed their trial: {failure}" if failure else ""


class _Stamps(Rule):
    """Replaces the parameters by the gradient."""

    def update(self, state: dict[str, Any], push: Push, apply: Any) -> None:
        push.params[:] = push.grad


def _change(guard: Guard, data: np.ndarray, stamp: int, times: int) -> int:
    """Change and copy ``times`` times. Returns the number of copies with two different stamps."""
    copy, torn = np.empty_like(data), 0
    for _ in range(times):
        with guard.changing():
            data[0] += 1
            data[1:] = stamp
        guard.copy(data, copy)
        torn += bool((copy[1:] != copy[1]).any())
    return torn
