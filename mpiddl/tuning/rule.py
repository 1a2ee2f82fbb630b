"""What is known without measuring here: figures of docs/communicator.md, of 2 to 8 ranks on one to four nodes."""

from __future__ import annotations

from math import inf

from mpiddl.node.topology import Topology

LIBRARY = "library"

READ = "read"
"""Where ranks may read each other's memory; elsewhere another one is taken instead."""

MULTICAST = "multicast"
"""Between hosts where it works; elsewhere another one is taken instead."""

RING_VERBS, TWO_STEP_VERBS = "ring-verbs", "two-step-verbs"
"""Between nodes that have RDMA devices; elsewhere the same over MPI is taken instead."""

BUCKETS, BUCKETS_VERBS = "buckets", "buckets-verbs"
"""Parts of a gradient, summed during the backward pass (`mpiddl.collectives.buckets`); over verbs."""

OVER_VERBS = (RING_VERBS, TWO_STEP_VERBS)

SHORT_BYTES = 16 << 10
"""Up to this size the number of rounds matters more than the number of bytes."""

WITHOUT_KERNELS_BYTES = 64 << 10
"""Up to this size a compiled kernel saves some 50 microseconds; loading numba takes a second."""

WORTH_BYTES = 1 << 20
"""A smaller gradient is summed in less time than a thread needs to wake up."""

CANDIDATES: dict[str, tuple[str, ...]] = {
    "allreduce": (LIBRARY, READ, "two-step", "two-step-leader", "ring", "doubling", TWO_STEP_VERBS, RING_VERBS),
    "reduce": (LIBRARY, READ, "scatter", "binomial"),
    "bcast": (LIBRARY, "chain", "scatter", "binomial", MULTICAST),
    "allgather": (LIBRARY, "ring", MULTICAST),
    "reduce_scatter": (LIBRARY, READ, "ring"),
    "barrier": (LIBRARY, "dissemination"),
}
"""Of each call; the library's own algorithm is always one."""

UNFUSED = {call: f"{call}_unfused" for call in ("allreduce", "reduce", "reduce_scatter")}
"""What these are called in tables where no compiled kernel adds in shared memory (`mpiddl.collectives.arguments.fused`), that
is, for all types and operations but sums of float32 and float64."""

CANDIDATES |= {name: CANDIDATES[call] for call, name in UNFUSED.items()}

MESSAGE, EAGER, RENDEZVOUS = "message", "eager-verbs", "rendezvous-verbs"
"""To the next rank of a ring of all ranks. Over verbs a message is copied into a registered buffer, or moved without copies."""

MEASURED = CANDIDATES | {MESSAGE: (LIBRARY, EAGER, RENDEZVOUS)}
"""What a table tells of."""

FEW = 4
"""Ranks of a node for which there are measurements; their arrays are summed in one call of a kernel."""

Steps = tuple[tuple[int, str], ...]

ONE_NODE: dict[str, Steps] = {"allreduce": ((16 << 10, "two-step"),)}
"""From so many bytes on, this; below the first, and where nothing stands, the library."""

NEVER = 1 << 62

READ_BYTES: dict[str, dict[str, tuple[int, ...]]] = {
    "allreduce": {"": (1 << 20, 1 << 20, 1 << 20)},
    "reduce": {"MPICH": (128 << 10, 128 << 10, 128 << 10), "": (NEVER, 8 << 20, 4 << 20)},
    "reduce_scatter": {"MPICH": (128 << 10, 256 << 10, 1 << 20), "": (128 << 10, 1 << 20, 1 << 20)},
}
"""From so many bytes on 2, 3, 4 ranks of one node read each other's memory, where they may, by what the library calls itself,
at last any. Below, two-step or the library is faster. 3 and 4 ranks were measured on two cores."""

ONE_LARGE_NODE: dict[str, Steps] = {"allreduce": ((256 << 10, "two-step"),)}

ACROSS: dict[str, dict[str, Steps]] = {
    "Open MPI": {
        "allreduce": ((64 << 10, "two-step"),),
        "bcast": ((24 << 10, "chain"),),
        "allgather": ((512 << 10, "ring"),),
        "reduce_scatter": ((128 << 10, "ring"),),
    },
    "MPICH": {
        "allreduce": ((128 << 10, "two-step"),),
        "bcast": ((64 << 10, "chain"),),
        "allgather": ((128 << 10, "ring"),),
        "reduce_scatter": ((128 << 10, "ring"),),
    },
    "": {
        "allreduce": ((128 << 10, "two-step"),),
        "bcast": ((64 << 10, "chain"),),
        "allgather": ((512 << 10, "ring"),),
        "reduce_scatter": ((128 << 10, "ring"),),
    },
}  # fmt: skip
"""Over TCP, by what a library calls itself, at last for any; of faster networks nothing is known without measuring."""


NONBLOCKING_BYTES: dict[str, float] = {"Open MPI": 1 << 20, "": inf}
"""Between nodes, by what a library calls itself, at last for any. Where a list of requests is waited for, shorter ones, and all
with MPICH, are slower than the library's (``mpiddl bench iallreduce``)."""


def steps(topology: Topology, call: str, library: str, reads: bool) -> Steps:
    """From how many bytes on which algorithm, ascending; ``library``: the MPI library's name and version; ``reads``: all ranks
    may read each other's memory."""
    unfused = call in UNFUSED.values()
    if topology.size == 1 or (unfused and len(topology.nodes) == 1):  # numpy adds more slowly than the library
        return ()
    call = call.removesuffix("_unfused")
    if len(topology.nodes) == 1:
        known = ONE_NODE if topology.size <= FEW else ONE_LARGE_NODE
        if reads and topology.size <= FEW and call in READ_BYTES:
            begins = next(found for name, found in READ_BYTES[call].items() if library.startswith(name))
            return (*known.get(call, ()), (begins[topology.size - 2], READ))
    else:
        known = next(found for name, found in ACROSS.items() if library.startswith(name))
    return known.get(call, ())


def nonblocking_bytes(topology: Topology, library: str) -> float:
    """From so many bytes on, a call that returns a request may be ours, which a thread advances; infinity for never.

    On one node, ranks that wait in the library poll on the cores that the threads need.
    """
    least = next(found for name, found in NONBLOCKING_BYTES.items() if library.startswith(name))
    return least if len(topology.nodes) > 1 else inf


def candidates(topology: Topology, call: str, reads: bool, multicast: bool = False, verbs: bool = False) -> tuple[str, ...]:
    """What may be taken on such a cluster. ``multicast``, ``verbs``: they work."""
    unfit = {"two-step-leader", MULTICAST, *OVER_VERBS} if len(topology.nodes) == 1 else set()
    works = {READ: reads, MULTICAST: multicast} | dict.fromkeys(OVER_VERBS, verbs)
    unfit |= {name for name, its in works.items() if not its}
    return tuple(name for name in CANDIDATES[call] if name not in unfit)


def own(topology: Topology, library: str, reads: bool, call: str, nbytes: int, kernels: bool = True) -> str:
    """The algorithm of mpiddl for a call that shall not be the library's: by `steps` where these name one.

    ``kernels``: whether compiled kernels may be loaded for a short message.
    """
    if not kernels and nbytes <= WITHOUT_KERNELS_BYTES and len(topology.nodes) == 1:
        return "doubling"
    found = [name for begin, name in steps(topology, call, library, reads) if begin <= nbytes]
    if found:
        return found[-1]
    short = nbytes <= SHORT_BYTES
    return {
        "allreduce": "doubling" if short and len(topology.nodes) > 1 else "two-step",
        "bcast": "binomial" if short else "chain",
        "allgather": "ring",
        "reduce": "binomial" if short else READ,
        "reduce_scatter": READ,
    }[call]


def gradient(topology: Topology, nbytes: int) -> tuple[str, str]:
    """The algorithm for a gradient that is made part by part, in memory of our choice; and why."""
    if topology.size == 1:
        return "none", "there is one rank"
    if len(topology.nodes) == 1:
        return "two-step", "on one node memory is the limit, which computing needs as well"
    if nbytes >= WORTH_BYTES:
        return BUCKETS, "links are slow enough to work while the backward pass goes on"
    if nbytes <= SHORT_BYTES:
        return "doubling", f"for {nbytes} bytes rounds count more than bytes"
    return "two-step", f"{nbytes / 1e6:.2g} MB are too few to start early"
