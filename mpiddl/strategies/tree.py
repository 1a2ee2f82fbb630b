"""Synchronous SGD whose sums are one binary tree over the virtual shards: the same bits on every number of ranks.

Every shard's gradient is a leaf, made of the shard's rows alone. A rank adds up its own shards, and the collective goes on
in the same tree over ranks. If the number of ranks divides a number of shards that is a power of two, each rank holds a
whole branch, and neither the terms nor the order of any addition depends on who holds which. Bytes do not grow.
`mpiddl.strategies.reproducible` takes it in the place of `allreduce` and its like.

Cost a step: 2 (N-1)/N V sent by a node, N nodes; for each shard of a rank a gradient written and added, so about 3 V of
memory traffic a shard.
Source: see `mpiddl.collectives.allreduce_tree`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.collectives import TreeSum
from mpiddl.strategies.base import Combined, Replica, Step, Strategy
from mpiddl.transport.base import Comm


@dataclass(frozen=True)
class Tree(Strategy):
    """Sum the gradients over all shards of all ranks in every step, in one tree."""

    sums_gradients = True
    by_shard = True

    def memory(self, comm: Comm, size: int, dtype: np.dtype) -> np.ndarray | None:
        return self._reduction(comm, size, dtype).input if comm.size > 1 else None

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        if comm.size == 1:
            return Combined(grad, step.total, state)
        reduction = self._reduction(comm, grad.size, grad.dtype)
        if grad is not reduction.input:  # a strategy before this one has made it
            reduction.input[:] = grad
        return Combined(reduction(), step.total, state)

    def _reduction(self, comm: Comm, size: int, dtype: np.dtype) -> TreeSum:
        """Made once; it lives as long as ``comm``."""
        return comm.kept((self, size, dtype), lambda: TreeSum(comm, size, dtype))
