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

import numpy as np

from mpiddl.collectives import TreeSum
from mpiddl.strategies.synchronous.gradient_sum import GradientSum
from mpiddl.transport.comm import Comm


@dataclass(frozen=True)
class Tree(GradientSum):
    """Sum the gradients over all shards of all ranks in every step, in one tree."""

    sums_gradients = True
    by_shard = True

    def reduction(self, comm: Comm, size: int, dtype: np.dtype) -> TreeSum:
        return TreeSum(comm, size, dtype)
