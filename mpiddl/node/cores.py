"""The cores of a node, divided among its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mpiddl.machine import threads
from mpiddl.node.topology import neighbours
from mpiddl.transport.comm import Comm


@contextmanager
def limited_threads(comm: Comm, wanted: int, env: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """BLAS and numba threads of this rank while the block runs; yields how many, and a warning or nothing. Collective.

    The cores that ranks may run on count as they are when they are first asked for.

    Parameters
    ----------
    wanted : int
        Threads a rank; 0 for the cores of the node divided by its ranks, unless ``env`` sets a number.
    """
    ranks, cores = node(comm)
    chosen = threads.threads_per_rank(cores, ranks, wanted or None, env)
    note = threads.warning(cores, ranks, chosen)
    with threads.apply(chosen):
        yield chosen.numba, note or ""


def node(comm: Comm) -> tuple[int, int]:
    """The ranks of this rank's node, and the cores that they may use when they are first asked for. Collective."""
    local = neighbours(comm).local
    return local.size, local.kept("cores", lambda: threads.node_cores(local.setup_allgather(threads.cores())))
