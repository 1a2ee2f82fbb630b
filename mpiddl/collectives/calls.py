"""The collectives as calls on numpy arrays: what a program uses.

Arrays lie anywhere, of any shape, C-contiguous. Each call is collective over ``comm`` and takes the algorithm by name;
the form with an ``i`` in front returns a request (`Started`) and leaves the buffers in use until it is complete.
`checked=True` spends an all-gather to find ranks that call with different sizes, dtypes, ops or algorithms; without it
they hang or end in garbage, as in MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from mpiddl.collectives.allgather_multicast import allgather_multicast
from mpiddl.collectives.allgather_ring import allgather_ring
from mpiddl.collectives.allreduce_doubling import allreduce_doubling
from mpiddl.collectives.allreduce_ring import allreduce_ring
from mpiddl.collectives.allreduce_staged import stage
from mpiddl.collectives.allreduce_tree import exchange, kept_plan
from mpiddl.collectives.allreduce_two_step import staged
from mpiddl.collectives.arguments import check_alike, check_alive, check_op, check_root, checking, flat, flat_pair
from mpiddl.collectives.barrier_dissemination import barrier_dissemination
from mpiddl.collectives.broadcast_binomial import broadcast_binomial
from mpiddl.collectives.broadcast_chain import broadcast_chain
from mpiddl.collectives.broadcast_multicast import broadcast_multicast
from mpiddl.collectives.broadcast_scatter import broadcast_scatter
from mpiddl.collectives.multicast import pieces_of, works
from mpiddl.collectives.plan import staged_steps
from mpiddl.collectives.reading import reading
from mpiddl.collectives.reduce_binomial import reduce_binomial
from mpiddl.collectives.reduce_scatter_gather import reduce_scatter_gather
from mpiddl.collectives.reduce_scatter_ring import reduce_scatter_ring
from mpiddl.collectives.wire import MPI, VERBS, Wire, new_wire, wire
from mpiddl.errors import ShapeError, UsageError
from mpiddl.layout import block_bounds
from mpiddl.node.process_memory import readable
from mpiddl.node.topology import neighbours
from mpiddl.progress.started import Queue, Started, Steps, run
from mpiddl.transport.base import SUM, Op
from mpiddl.transport.comm import Comm
from mpiddl.tuning.rule import MULTICAST, READ, RING_VERBS, TWO_STEP_VERBS, own

WITHOUT_KERNELS = "auto without kernels"
"""As auto, but no compiled kernel is loaded for a short message: for programs that need none otherwise."""

Under = tuple[tuple[Any, ...], Steps, Queue | None]
"""The communicators that a collective sends on, its steps, and those it must not overlap with."""


def _two_step(comm: Comm, source: np.ndarray, result: np.ndarray, op: Op, leader: bool = False, transport: str = MPI) -> Under:
    if not leader and comm.size == len(neighbours(comm).topology.nodes) and transport == MPI:
        return _ring(comm, source, result, op)  # the same messages, without a copy into shared memory
    if not leader and (through := stage(comm, result.dtype, op)) is not None:
        return (), through.steps(through.allreduce(source, result)), through
    plan = staged(comm, result.nbytes, result.dtype, op, leader=leader, transport=transport)
    return plan.wires, staged_steps(plan, source, result), plan


def _leader(comm: Comm, source: np.ndarray, result: np.ndarray, op: Op) -> Under:
    return _two_step(comm, source, result, op, leader=True)


def _two_step_verbs(comm: Comm, source: np.ndarray, result: np.ndarray, op: Op) -> Under:
    return _two_step(comm, source, result, op, transport=VERBS)


def _read(comm: Comm, source: np.ndarray, result: np.ndarray, op: Op) -> Under:
    if (through := reading(comm, result.dtype, op)) is None:
        return _two_step(comm, source, result, op)
    return (), through.steps(through.allreduce(source, result)), through


def _ring(comm: Comm, source: np.ndarray, result: np.ndarray, op: Op, transport: str = MPI) -> Under:
    way = _round_nodes(comm, transport)
    return (way.comm,), allreduce_ring(way, source, result, op), None


def _ring_verbs(comm: Comm, source: np.ndarray, result: np.ndarray, op: Op) -> Under:
    return _ring(comm, source, result, op, VERBS)


def _doubling(comm: Comm, source: np.ndarray, result: np.ndarray, op: Op) -> Under:
    way = wire(comm)
    return (way.comm,), allreduce_doubling(way, source, result, op), None


def _tree(comm: Comm, source: np.ndarray, result: np.ndarray, op: Op) -> Under:
    plan = kept_plan(comm, result.nbytes, result.dtype, op)
    if plan is not None:
        return plan.wires, staged_steps(plan, source, result), plan
    way = wire(comm)
    return (way.comm,), exchange(way, lambda begin, end: source[begin:end], result, op), None


def _round_nodes(comm: Comm, transport: str = MPI) -> Wire:
    """The wire on which neighbours of a ring are on the same node wherever that is possible."""
    return comm.kept(("wire round nodes", transport), lambda: new_wire(neighbours(comm).ring, transport))


ALLREDUCE: dict[str, Callable[..., Under]] = {
    "two-step": _two_step,
    "two-step-leader": _leader,
    TWO_STEP_VERBS: _two_step_verbs,
    READ: _read,
    "ring": _ring,
    RING_VERBS: _ring_verbs,
    "doubling": _doubling,
    "tree": _tree,
}
BROADCAST: dict[str, Callable[..., Steps]] = {
    "chain": broadcast_chain,
    "scatter": broadcast_scatter,
    "binomial": broadcast_binomial,
}
ALLGATHER = ("ring", MULTICAST)

REDUCE: dict[str, Callable[..., Steps]] = {"scatter": reduce_scatter_gather, "binomial": reduce_binomial}


def iallreduce(comm: Comm, sendbuf: Any, recvbuf: np.ndarray, op: Op = SUM, *, algorithm: str = "auto",
               checked: bool = False, blocking: bool = False) -> Started:
    """Start `allreduce`; returns a request."""
    check_alive(comm)
    with checking(comm, checked):
        source, result = flat_pair(comm, sendbuf, recvbuf, op)
        _check(ALLREDUCE, algorithm)
    chosen = _choice(comm, "allreduce", algorithm, result.nbytes)
    if checked:
        check_alike(comm, "allreduce", size=result.size, dtype=result.dtype, op=op.name, algorithm=chosen)
    if comm.size == 1 or not result.size:
        return run(comm, (), _copy(source, result), blocking)
    wires, steps, queue = ALLREDUCE[chosen](comm, source, result, op)
    return run(comm, wires, steps, blocking, queue)


def allreduce(comm: Comm, sendbuf: Any, recvbuf: np.ndarray, op: Op = SUM, *, algorithm: str = "auto",
              checked: bool = False) -> None:
    """The reduction of all ranks' ``sendbuf``, in ``recvbuf`` of every rank, the same bits everywhere.

    Parameters
    ----------
    comm : Comm
        From `mpiddl.transport.mpi.connect`, or a virtual one.
    sendbuf : ndarray or IN_PLACE
        This rank's contribution; IN_PLACE (or the same array) takes it from ``recvbuf``.
    recvbuf : ndarray
        As many elements of the same dtype.
    op : Op
        SUM, MIN, MAX or PROD.
    algorithm : str
        ``two-step``, ``two-step-leader``, ``read`` (two-step where ranks may not read each other's memory), ``ring``,
        ``doubling``, ``tree`` (in one order, wherever the ranks are), or ``auto`` (`mpiddl.tuning.rule.own`). ``ring-verbs``
        and ``two-step-verbs`` send over RDMA verbs between nodes, or over MPI where these do not work. What each costs stands
        on top of its file.
    checked : bool
        Compare the ranks' calls first.

    Raises
    ------
    ShapeError, UsageError
        A buffer, dtype, op or algorithm that cannot be taken, on the ranks that gave it (all, if all gave the same).
    MismatchError
        If ``checked``, on every rank: they called differently.
    CommError
        ``comm`` was freed; a node has not enough room for shared memory (two-step).

    Communication
    -------------
    Collective. Two-step: 2 (N-1)/N V a node, N nodes; ring: 2 (P-1)/P V a rank; tree: one of these; doubling: ceil(log2 P)
    V a rank.

    Examples
    --------
    >>> import numpy as np
    >>> from mpiddl.transport import virtual
    >>> def program(comm):
    ...     total = np.zeros(3, np.float32)
    ...     allreduce(comm, np.full(3, comm.rank, np.float32), total, algorithm="ring")
    ...     return total.tolist()
    >>> virtual.run(3, program)
    [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
    """
    iallreduce(comm, sendbuf, recvbuf, op, algorithm=algorithm, checked=checked, blocking=True)


def ireduce_scatter(comm: Comm, sendbuf: np.ndarray, recvbuf: np.ndarray, op: Op = SUM, *, algorithm: str = "auto",
                    checked: bool = False, blocking: bool = False) -> Started:
    """Start `reduce_scatter`; returns a request."""
    check_alive(comm)
    with checking(comm, checked):
        source, block = flat("sendbuf", sendbuf), flat("recvbuf", recvbuf, writable=True)
        check_op(op, source.dtype)
        _check_block(comm, "recvbuf", block, source)
        _check(("ring", READ), algorithm)
    chosen = _choice(comm, "reduce_scatter", algorithm, source.nbytes)
    if checked:
        check_alike(comm, "reduce_scatter", size=source.size, dtype=source.dtype, op=op.name, algorithm=chosen)
    if chosen == READ and (through := reading(comm, source.dtype, op)) is not None:
        return run(comm, (), through.steps(through.reduce_scatter(source, block)), blocking, through)
    way, order = _round_nodes(comm), neighbours(comm).topology.ring
    return run(comm, (way.comm,), reduce_scatter_ring(way, source, block, op, order=order), blocking)


def reduce_scatter(comm: Comm, sendbuf: np.ndarray, recvbuf: np.ndarray, op: Op = SUM, *, algorithm: str = "auto",
                   checked: bool = False) -> None:
    """One block of the reduction of all ranks' ``sendbuf`` for each rank, in ``recvbuf``.

    Blocks are contiguous and differ by one element at most (`mpiddl.layout.block_bounds`); ``recvbuf`` has this rank's size.
    ``algorithm``: ``ring``, ``read`` (a ring where ranks may not read each other's memory), or ``auto``: read. Errors as
    `allreduce`.

    Communication
    -------------
    Collective: (P-1)/P V sent, or read, by each rank, V being all of ``sendbuf``.
    """
    ireduce_scatter(comm, sendbuf, recvbuf, op, algorithm=algorithm, checked=checked, blocking=True)


def iallgather(comm: Comm, sendbuf: np.ndarray, recvbuf: np.ndarray, *, algorithm: str = "auto", checked: bool = False,
               blocking: bool = False) -> Started:
    """Start `allgather`; returns a request."""
    check_alive(comm)
    with checking(comm, checked):
        block, result = flat("sendbuf", sendbuf), flat("recvbuf", recvbuf, writable=True)
        _check_block(comm, "sendbuf", block, result)
        _check(ALLGATHER, algorithm)
    chosen = _choice(comm, "allgather", algorithm, result.nbytes)
    if checked:
        check_alike(comm, "allgather", size=result.size, dtype=result.dtype, algorithm=chosen)
    if chosen == MULTICAST and works(comm) and result.size:
        topology = neighbours(comm).topology
        through = pieces_of(comm, range(len(topology.nodes)))
        return run(comm, (), allgather_multicast(through, topology, comm.rank, block, result), blocking, through)
    way, order = _round_nodes(comm), neighbours(comm).topology.ring
    return run(comm, (way.comm,), allgather_ring(way, block, result, order=order), blocking)


def allgather(comm: Comm, sendbuf: np.ndarray, recvbuf: np.ndarray, *, algorithm: str = "auto",
              checked: bool = False) -> None:
    """All ranks' blocks one behind the other, in ``recvbuf`` of every rank.

    ``sendbuf`` has the size of this rank's block of ``recvbuf`` (`mpiddl.layout.block_bounds`). ``algorithm``: ``ring``,
    ``multicast`` (a ring where multicast does not work), or ``auto``: ring. Errors as `allreduce`.

    Communication
    -------------
    Collective: ring (P-1)/P V sent by each rank, V being all of ``recvbuf``; multicast: by each host its own blocks.
    """
    iallgather(comm, sendbuf, recvbuf, algorithm=algorithm, checked=checked, blocking=True)


def ibroadcast(comm: Comm, buf: np.ndarray, root: int = 0, *, algorithm: str = "auto", checked: bool = False,
               blocking: bool = False) -> Started:
    """Start `broadcast`; returns a request."""
    check_alive(comm)
    with checking(comm, checked):
        check_root(comm, root)
        data = flat("buf", buf, writable=comm.rank != root or algorithm == "scatter")  # which brings the root all blocks, too
        _check((*BROADCAST, MULTICAST), algorithm)
    chosen = _choice(comm, "bcast", algorithm, data.nbytes)
    if checked:
        check_alike(comm, "broadcast", size=data.size, dtype=data.dtype, root=root, algorithm=chosen)
    way = _round_nodes(comm)
    topology = neighbours(comm).topology
    if chosen == MULTICAST and works(comm) and data.size:
        node = topology.node(root)
        through = pieces_of(comm, [node])
        return run(comm, (), broadcast_multicast(through, data, node, comm.rank == root), blocking, through)
    chosen = next(iter(BROADCAST)) if chosen == MULTICAST else chosen
    start = topology.ring.index(root)
    return run(comm, (way.comm,), BROADCAST[chosen](way, data, start), blocking)


def broadcast(comm: Comm, buf: np.ndarray, root: int = 0, *, algorithm: str = "auto", checked: bool = False) -> None:
    """Every rank's ``buf`` becomes the root's.

    ``algorithm``: ``chain``, ``scatter`` (scatter and all-gather), ``binomial``, ``multicast`` (a chain where multicast does
    not work), or ``auto``: binomial for short arrays, else chain. Errors as `allreduce`.

    Communication
    -------------
    Collective: chain V a rank, the last none; scatter (P-1)/P V a rank, the root twice that; binomial (P-1)/P V on average;
    multicast V from the host of the root alone.
    """
    ibroadcast(comm, buf, root, algorithm=algorithm, checked=checked, blocking=True)


def ireduce(comm: Comm, sendbuf: np.ndarray, recvbuf: np.ndarray | None, op: Op = SUM, root: int = 0, *,
            algorithm: str = "auto", checked: bool = False, blocking: bool = False) -> Started:
    """Start `reduce`; returns a request."""
    check_alive(comm)
    with checking(comm, checked):
        check_root(comm, root)
        if comm.rank == root:
            source, result = flat_pair(comm, sendbuf, recvbuf, op)
        else:
            source, result = flat("sendbuf", sendbuf), None
            check_op(op, source.dtype)
        _check((*REDUCE, READ), algorithm)
    chosen = _choice(comm, "reduce", algorithm, source.nbytes)
    if checked:
        check_alike(comm, "reduce", size=source.size, dtype=source.dtype, op=op.name, root=root, algorithm=chosen)
    if chosen == READ and (through := reading(comm, source.dtype, op)) is not None:
        return run(comm, (), through.steps(through.reduce(source, result)), blocking, through)
    chosen = "scatter" if chosen == READ else chosen
    way = _round_nodes(comm)
    start = neighbours(comm).topology.ring.index(root)
    return run(comm, (way.comm,), REDUCE[chosen](way, source, result, op, start), blocking)


def reduce(comm: Comm, sendbuf: np.ndarray, recvbuf: np.ndarray | None, op: Op = SUM, root: int = 0, *,
           algorithm: str = "auto", checked: bool = False) -> None:
    """The reduction of all ranks' ``sendbuf``, in the root's ``recvbuf``; other ranks may give None.

    ``algorithm``: ``scatter`` (reduce-scatter and gather), ``binomial``, ``read`` (scatter where ranks may not read each
    other's memory), or ``auto``: binomial for short arrays, else read. The root may give IN_PLACE as ``sendbuf``. Errors as
    `allreduce`.

    Communication
    -------------
    Collective: scatter V a rank at most; binomial V a rank, in ceil(log2 P) rounds; read (P-1)/P V a rank, the root twice that.
    """
    ireduce(comm, sendbuf, recvbuf, op, root, algorithm=algorithm, checked=checked, blocking=True)


def ibarrier(comm: Comm, *, blocking: bool = False) -> Started:
    """Start `barrier`; returns a request."""
    check_alive(comm)
    way = wire(comm)
    return run(comm, (way.comm,), barrier_dissemination(way), blocking)


def barrier(comm: Comm) -> None:
    """Returns when all ranks have called it: ceil(log2 P) empty messages a rank."""
    ibarrier(comm, blocking=True)


def _check(known: Collection[str], algorithm: str) -> None:
    if algorithm not in ("auto", WITHOUT_KERNELS, *known):
        raise UsageError(f"algorithm: got {algorithm!r}, expected one of auto, {', '.join(known)}")


def _choice(comm: Comm, call: str, algorithm: str, nbytes: int) -> str:
    """What is asked for, or by the rule."""
    if algorithm not in ("auto", WITHOUT_KERNELS):
        return algorithm
    near, library, reads = comm.kept("place", lambda: (neighbours(comm), comm.library(), readable(comm) is not None))
    return own(near.topology, library, reads, call, nbytes, kernels=algorithm == "auto")


def _check_block(comm: Comm, name: str, block: np.ndarray, whole: np.ndarray) -> None:
    begin, end = block_bounds(whole.size, comm.size, comm.rank)
    if block.size != end - begin or block.dtype != whole.dtype:
        raise ShapeError(
            f"{name}: got {block.size} elements of {block.dtype}, expected {end - begin} elements of {whole.dtype}: "
            f"the block of rank {comm.rank} when {whole.size} elements are divided among {comm.size} ranks"
        )
    if np.may_share_memory(block, whole) and block.size:
        raise ShapeError("sendbuf and recvbuf: got overlapping buffers, expected separate buffers")


def _copy(source: np.ndarray, result: np.ndarray) -> Steps:
    if source is not result:
        result[...] = source
    yield from ()
