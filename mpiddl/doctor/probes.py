"""What the doctor tries on a communicator: nodes, threads, shared memory, one-sided memory, messages, sums, RDMA verbs.

Each probe is collective, checks what it received on this rank, and registers what has to be freed. What is
known to break, and therefore tried: shared memory where the ranks of a host sit in containers of their own;
one-sided operations on some fabrics (open-mpi/ompi#14174, #10633); large messages where small ones pass,
because processes may not read each other's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpiddl.doctor import start_barrier
from mpiddl.doctor.check_result import Finding, spell
from mpiddl.errors import CommError
from mpiddl.machine import threads

if TYPE_CHECKING:
    from mpi4py import MPI

LARGE = 4 << 20  # bytes: beyond the eager limit of every transport, so that the rendezvous path is tried
DEVICES = Path("/sys/class/infiniband")
LISTED = 8  # nodes that are named; a table of a hundred is not read


def _thread_level(name: str, comm: MPI.Intracomm, env: Mapping[str, str], made: ExitStack) -> Finding:
    """What MPI allows threads to do."""
    from mpi4py import MPI

    levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    level = ("single", "funneled", "serialized", "multiple")[levels.index(MPI.Query_thread())]
    if level == "multiple":
        return Finding(name, True, level)
    return Finding(name, None, level, "there is no progress thread; use an MPI library built with thread support")


def _node_map(name: str, comm: MPI.Intracomm, env: Mapping[str, str], made: ExitStack) -> Finding:
    """Which ranks share a node's memory, compared with which share a host name."""
    from mpi4py import MPI

    node = _node(comm, made)
    leader = node.bcast(comm.rank)
    pairs = comm.allgather((leader, MPI.Get_processor_name()))
    groups: dict[tuple[int, str], list[int]] = {}
    for rank, pair in enumerate(pairs):
        groups.setdefault(pair, []).append(rank)
    named = [f"{host}: {spell(ranks)}" for (_, host), ranks in groups.items()]
    more = f" and {len(named) - LISTED} more" if len(named) > LISTED else ""
    split = len(groups) > len({host for _, host in groups})
    remedy = "ranks of one host do not share memory: start them in the same container" if split else ""
    return Finding(name, None if split else True, "; ".join(named[:LISTED]) + more, remedy)


def _threads(name: str, comm: MPI.Intracomm, env: Mapping[str, str], made: ExitStack) -> Finding:
    """The ranks of this node, and the threads each would take, against its cores."""
    node = _node(comm, made)
    cores = threads.node_cores(node.allgather(threads.cores()))
    chosen = threads.threads_per_rank(cores, node.size, None, env)
    value = f"{node.size} ranks x {max(chosen.blas, chosen.numba)} threads on {cores} cores"
    note = threads.warning(cores, node.size, chosen)
    return Finding(name, None if note else True, value, (note or "").rpartition("; ")[2])


def _shared_memory(name: str, comm: MPI.Intracomm, env: Mapping[str, str], made: ExitStack) -> Finding:
    """Each rank writes its part of its node's shared memory and reads its neighbour's."""
    node, memory = _node_memory(comm, made)
    mine, right = memory.segments[node.rank].view(np.float64), (node.rank + 1) % node.size
    mine[0] = node.rank + 1
    node.Barrier()
    came = float(memory.segments[right].view(np.float64)[0])
    node.Barrier()
    remedy = "give all ranks of a host the same /dev/shm, with free space (Docker: --ipc=host)"
    return _compared(name, came == right + 1, f"got {came:g} from rank {right}, expected {right + 1}", remedy)


def _one_sided(name: str, comm: MPI.Intracomm, env: Mapping[str, str], made: ExitStack) -> Finding:
    """Put, Get, Accumulate and Fetch_and_op between all ranks, with sums that come out exactly."""
    from mpi4py import MPI

    try:
        _node_memory(comm, made)
        shares = True
    except CommError:
        shares = False
    if not all(comm.allgather(shares)):
        return Finding(name, None, "not tested: Open MPI crashes if ranks of a node share no memory", "see shared memory")
    size, right = comm.size, (comm.rank + 1) % comm.size
    window: Any = MPI.Win.Allocate(3 * 8, 8, comm=comm)
    made.callback(window.Free)
    memory = np.frombuffer(window, np.float64)  # put by the left neighbour, sum over ranks, next ticket
    window.Lock(comm.rank, MPI.LOCK_EXCLUSIVE)
    memory[:] = 0
    window.Unlock(comm.rank)
    comm.Barrier()
    own, one, ticket, got = np.array([comm.rank + 1.0]), np.ones(1), np.zeros(1), np.zeros(3)
    window.Lock_all()
    window.Put(own, right, 0)
    for target in range(size):
        window.Accumulate(own, target, 1, MPI.SUM)
    window.Fetch_and_op(one, ticket, 0, 2, MPI.SUM)
    window.Flush_all()
    comm.Barrier()
    window.Get(got, right, 0)
    window.Flush(right)
    window.Unlock_all()
    tickets = sorted(comm.allgather(float(ticket[0])))
    right_values = [comm.rank + 1, size * (size + 1) / 2]
    well = got[:2].tolist() == right_values and tickets == list(range(size))
    came = f"got {got[:2].tolist()} and tickets {tickets}, expected {right_values} and 0 to {size - 1}"
    return _compared(name, well, came, "Open MPI: set OMPI_MCA_osc=^ucx; otherwise ask your site")


def _ring(name: str, comm: MPI.Intracomm, env: Mapping[str, str], made: ExitStack) -> Finding:
    """A small and a large message to the right neighbour, from the left one."""
    left, right, seconds = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size, []
    remedy = "if only large messages fail, processes cannot read each other's memory; Open MPI: set OMPI_MCA_smsc=^cma"
    for nbytes in (8, LARGE):
        out, into = np.full(nbytes // 8, float(comm.rank)), np.full(nbytes // 8, -1.0)
        seconds.append(_timed(comm, lambda out=out, into=into: comm.Sendrecv(out, right, 0, into, left, 0)))
        if not (into == left).all():
            return Finding(name, False, f"{nbytes} bytes from rank {left} arrived damaged", remedy)
    return Finding(name, True, f"8 B in {seconds[0] * 1e6:.0f} us, 4 MiB in {seconds[1] * 1e3:.1f} ms")


def _allreduce(name: str, comm: MPI.Intracomm, env: Mapping[str, str], made: ExitStack) -> Finding:
    """A sum over all ranks that comes out exactly."""
    total, seconds = comm.size * (comm.size + 1) / 2, []
    for nbytes in (8, LARGE):
        out, into = np.full(nbytes // 8, comm.rank + 1.0), np.zeros(nbytes // 8)
        seconds.append(_timed(comm, lambda out=out, into=into: comm.Allreduce(out, into)))
        if not (into == total).all():
            came = f"{nbytes} bytes: got {into[into != total][0]:g}, expected {total:g}"
            return Finding(name, False, came, "try another algorithm; Open MPI: set OMPI_MCA_coll=^han")
    return Finding(name, True, f"8 B in {seconds[0] * 1e6:.0f} us, 4 MiB in {seconds[1] * 1e3:.1f} ms")


def _verbs(name: str, comm: MPI.Intracomm, env: Mapping[str, str], made: ExitStack) -> Finding:
    """A small and a large message over RDMA verbs, as in `_ring`; or why they are not used."""
    from mpiddl.errors import TransportError, UsageError
    from mpiddl.transport.mpi import MpiComm
    from mpiddl.transport.verbs.transport import DEVICE, connect

    link = MpiComm.owning(comm.Dup())
    made.callback(link.Free)
    try:
        verbs = connect(link, env.get(DEVICE, ""))
    except (TransportError, UsageError) as error:
        if not env.get(DEVICE) and not (DEVICES.is_dir() and any(DEVICES.iterdir())):
            return Finding(name, True, "no RDMA device on this host, so MPI is used")
        value, _, remedy = str(error).removeprefix("verbs: ").partition("; ")
        return Finding(name, None, f"not used: {value}", remedy)
    made.callback(verbs.Free)
    left, right, seconds = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size, []
    for nbytes in (8, LARGE):
        out, into = np.full(nbytes // 8, float(comm.rank)), np.full(nbytes // 8, -1.0)
        seconds.append(_timed(comm, lambda out=out, into=into: verbs.Sendrecv(out, right, 0, into, left, 0)))
        if not (into == left).all():
            return Finding(name, False, f"{nbytes} bytes from rank {left} arrived damaged", f"switch verbs off: {DEVICE}=off")
    times = f"8 B in {seconds[0] * 1e6:.0f} us, 4 MiB in {seconds[1] * 1e3:.1f} ms"
    return Finding(name, True, f"{verbs.messages.device.port}: {times}")


def _node(comm: MPI.Intracomm, made: ExitStack) -> Any:
    """The ranks of ``comm`` that share this node's memory."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    made.callback(node.Free)
    return node


def _node_memory(comm: MPI.Intracomm, made: ExitStack) -> tuple[Any, Any]:
    """The same as a communicator of ours, and memory that they share; a `CommError` on all of them where there is none."""
    from mpiddl.transport.mpi import MpiComm  # not above: it wants compiled kernels, and the doctor tells why there are none

    node = MpiComm.owning(_node(comm, made).Dup())
    made.callback(node.Free)
    return node, node.share(8)


def _compared(name: str, well: bool, came: str, remedy: str) -> Finding:
    """A finding of a comparison."""
    return Finding(name, True, "works") if well else Finding(name, False, came, remedy)


def _timed(comm: MPI.Intracomm, call: Any) -> float:
    """Seconds of the second call, on the slowest rank: the first makes the connections."""
    from mpi4py import MPI

    call()
    comm.Barrier()
    began = MPI.Wtime()
    call()
    return comm.allreduce(MPI.Wtime() - began, MPI.MAX)


PROBES = {
    "thread level": _thread_level,
    "nodes": _node_map,
    "threads": _threads,
    "start barrier": start_barrier.probe,
    "messages": _ring,
    "allreduce": _allreduce,
    "shared memory": _shared_memory,
    "one-sided": _one_sided,
    "RDMA verbs": _verbs,
}
