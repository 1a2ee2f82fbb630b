"""Sharing a node: its cores divided among its ranks, and kernels compiled by one rank while the others wait asleep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpiddl import threads
from mpiddl.data import ShardedRows
from mpiddl.job import Job
from mpiddl.memory import aligned_zeros
from mpiddl.optim import clip_norm
from mpiddl.strategies import Strategy
from mpiddl.topology import neighbours


@contextmanager
def limited_threads(comm: Any, wanted: int, env: Mapping[str, str]) -> Iterator[tuple[int, str]]:
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


def node(comm: Any) -> tuple[int, int]:
    """The ranks of this rank's node, and the cores that they may use when they are first asked for. Collective."""
    local = neighbours(comm).local
    return local.size, local.kept("cores", lambda: threads.node_cores(local.allgather(threads.cores())))


def warm(comm: Any, model: Any, optimiser: Any, rows: ShardedRows, job: Job, strategy: Strategy) -> None:
    """Compile, or load from numba's cache, every kernel of a training step: one rank of each node first. Collective."""
    local = comm.local_ranks()
    if local.rank == 0:
        _compile(model, optimiser, rows, job, strategy, comm.size)
    local.patient_barrier()
    if local.rank != 0:
        _compile(model, optimiser, rows, job, strategy, comm.size)
    local.patient_barrier()
    local.Free()


def _compile(model: Any, optimiser: Any, rows: ShardedRows, job: Job, strategy: Strategy, size: int) -> None:
    """Call each kernel on next to nothing; what is compiled for a read-only array is another kernel."""
    shared = type(strategy).memory is not Strategy.memory  # then the sum may be one that must not be written
    dtype = np.dtype(job.dtype)
    if hasattr(model, "warm"):
        model.warm(dtype)
    params, grad = aligned_zeros(1, dtype), aligned_zeros(1, dtype)
    for writeable in (True, False) if shared else (True,):
        grad.flags.writeable = writeable
        optimiser.update(params, grad, optimiser.init(1, dtype), 0.0)
        if job.clip:
            clip_norm(grad, 1.0, job.clip)
    strategy.warm(size, dtype)
    rows.batch(0, 0)
