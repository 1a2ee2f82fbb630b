"""Kernels are compiled by one rank of each node, while the others wait asleep."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.data import ShardedRows
from mpiddl.memory import Views, aligned_zeros
from mpiddl.node.topology import neighbours
from mpiddl.optim import clip_norm
from mpiddl.strategies import Strategy
from mpiddl.training.job import Job
from mpiddl.transport.comm import Comm


def warm(comm: Comm, model: Any, optimiser: Any, rows: ShardedRows, job: Job, strategy: Strategy) -> None:
    """Compile, or load from numba's cache, every kernel of a training step: one rank of each node first. Collective."""
    local = neighbours(comm).local
    if local.rank == 0:
        _compile(model, optimiser, rows, job, strategy, comm.size)
    local.patient_barrier()
    if local.rank != 0:
        _compile(model, optimiser, rows, job, strategy, comm.size)
    local.patient_barrier()


def _compile(model: Any, optimiser: Any, rows: ShardedRows, job: Job, strategy: Strategy, size: int) -> None:
    """Call each kernel on next to nothing; what is compiled for a read-only array is another kernel."""
    shared = type(strategy).memory is not Strategy.memory  # then the sum may be one that must not be written
    dtype = np.dtype(job.dtype)
    if hasattr(model, "warm"):
        model.warm(dtype)
    params, grad = aligned_zeros(1, dtype), aligned_zeros(1, dtype)
    for writeable in (True, False) if shared else (True,):
        grad.flags.writeable = writeable
        optimiser.update(params, grad, Views(optimiser.init(1, dtype)), 0.0)
        if job.clip:
            clip_norm(grad, 1.0, job.clip)
    strategy.warm(size, dtype)
    rows.batch(0, 0)
