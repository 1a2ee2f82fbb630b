"""Synchronous SGD whose sums are one binary tree over the virtual shards: the same bits on every number of ranks.

The gradient of each shard, computed from its rows alone, is a leaf. A rank adds its own shards, and the collective continues
in the same tree over ranks. If the number of ranks divides a number of shards that is a power of two, each rank holds a
complete branch, and the additions do not depend on the distribution of the shards. The number of bytes does not grow.
`mpiddl.strategies.reproducible` uses it in place of `allreduce` and similar strategies.

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
from mpiddl.transport.comm import Comm


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
        if grad is not reduction.input:  # made by a previous strategy of a chain
            reduction.input[:] = grad
        return Combined(reduction(), step.total, state)

    def _reduction(self, comm: Comm, size: int, dtype: np.dtype) -> TreeSum:
        """Made once; it lives as long as ``comm``."""
        return comm.kept((self, size, dtype), lambda: TreeSum(comm, size, dtype))
