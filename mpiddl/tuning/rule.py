"""What is known without measuring here: figures of docs/communicator.md, of 2 to 8 ranks on one to four nodes."""

from __future__ import annotations

from mpiddl.topology import Topology

LIBRARY = "library"

CANDIDATES: dict[str, tuple[str, ...]] = {
    "allreduce": (LIBRARY, "read", "two-step", "two-step-leader", "ring", "doubling"),
    "reduce": (LIBRARY, "scatter", "binomial"),
    "bcast": (LIBRARY, "chain", "scatter", "binomial"),
    "allgather": (LIBRARY, "ring"),
    "reduce_scatter": (LIBRARY, "ring"),
    "barrier": (LIBRARY, "dissemination"),
}
"""Of each call; the library's own algorithm is always one."""

FEW = 4
"""Ranks up to which a node's arrays are summed in one call of a kernel (`allreduce_staged`)."""

Steps = tuple[tuple[int, str], ...]

ONE_NODE: dict[str, Steps] = {"allreduce": ((12 << 10, "two-step"),)}
"""From so many bytes on, this; below the first, and where nothing stands, the library."""

READ_BYTES = {2: 128 << 10, 3: 64 << 10, 4: 32 << 10}
"""From so many bytes on ranks of one node, so many of them, read each other's memory, where they may: what two-step adds up
grows with the ranks."""

ONE_LARGE_NODE: dict[str, Steps] = {"allreduce": ((256 << 10, "two-step"),)}

ACROSS: dict[str, dict[str, Steps]] = {
    "Open MPI": {
        "allreduce": ((16 << 10, "two-step-leader"), (64 << 10, "two-step")),
        "bcast": ((12 << 10, "chain"),),
        "allgather": ((512 << 10, "ring"),),
        "reduce_scatter": ((48 << 10, "ring"),),
    },
    "MPICH": {
        "allreduce": ((64 << 10, "two-step"),),
        "bcast": ((12 << 10, "chain"),),
        "allgather": ((48 << 10, "ring"),),
        "reduce_scatter": ((64 << 10, "ring"),),
    },
    "": {
        "allreduce": ((64 << 10, "two-step"),),
        "bcast": ((64 << 10, "chain"),),
        "allgather": ((512 << 10, "ring"),),
        "reduce_scatter": ((128 << 10, "ring"),),
    },
}  # fmt: skip
"""Over TCP, by what a library calls itself, at last for any; of faster networks nothing is known without measuring."""


def steps(topology: Topology, call: str, library: str, reads: bool) -> Steps:
    """From how many bytes on which algorithm, ascending; ``library``: the MPI library's name and version; ``reads``: all ranks
    may read each other's memory."""
    if topology.size == 1:
        return ()
    if len(topology.nodes) == 1:
        known = ONE_NODE if topology.size <= FEW else ONE_LARGE_NODE
        if call == "allreduce" and reads and topology.size in READ_BYTES:
            return (*known[call], (READ_BYTES[topology.size], "read"))
    else:
        known = next(found for name, found in ACROSS.items() if library.startswith(name))
    return known.get(call, ())


def candidates(topology: Topology, call: str, reads: bool) -> tuple[str, ...]:
    """What may be taken on such a cluster."""
    unfit = {"two-step-leader"} if len(topology.nodes) == 1 else set()
    return tuple(name for name in CANDIDATES[call] if name not in unfit | (set() if reads else {"read"}))
