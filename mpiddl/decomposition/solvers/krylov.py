"""Block Lanczos: the residuals are the directions. It takes any rows, and shares the vectors of wide matrices among the ranks.

Cost: that of the outer loop (`mpiddl.decomposition.solvers.davidson`); the directions cost nothing.
"""

from __future__ import annotations

from mpiddl.decomposition.rows.column_split import Spread, spread_for
from mpiddl.decomposition.solvers.base import Task
from mpiddl.decomposition.solvers.iterative import Iterative


class KrylovSolver(Iterative):
    """`Iterative` as it is, with sliced vectors where that pays."""

    def spread(self, task: Task) -> Spread:
        return spread_for(task.comm, task.rows.d, task.columns)
