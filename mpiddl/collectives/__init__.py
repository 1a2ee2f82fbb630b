"""Collectives by hand, one algorithm a file with its cost and source on top; `calls` is what programs use.

`wire` and `ring` are what several of them are made of, `base` how one is under way; `allreduce_two_step` is the one that
nodes with memory in common and links between them are made for.
"""

from mpiddl.collectives.allreduce_tree import TreeSum
from mpiddl.collectives.allreduce_two_step import TwoStep
from mpiddl.collectives.base import Started
from mpiddl.collectives.calls import (
    allgather,
    allreduce,
    barrier,
    broadcast,
    iallgather,
    iallreduce,
    ibarrier,
    ibroadcast,
    ireduce,
    ireduce_scatter,
    reduce,
    reduce_scatter,
)
from mpiddl.collectives.progress import progress

__all__ = [
    "Started",
    "TreeSum",
    "TwoStep",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "iallgather",
    "iallreduce",
    "ibarrier",
    "ibroadcast",
    "ireduce",
    "ireduce_scatter",
    "progress",
    "reduce",
    "reduce_scatter",
]
