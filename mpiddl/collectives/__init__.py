"""Collectives by hand, one algorithm a file with its cost and source on top; `calls` is what programs use.

`wire` and `ring` are what several of them are made of, `arguments` checks calls, and `mpiddl.progress` advances what is under
way. `allreduce_two_step` is made for nodes with memory in common and links between them.
"""

from mpiddl.collectives.allreduce_tree import TreeSum
from mpiddl.collectives.allreduce_two_step import TwoStep
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
from mpiddl.progress.started import Started
from mpiddl.progress.thread import progress

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
