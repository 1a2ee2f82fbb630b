"""What the iterative solvers have in common: a start from a sample, the outer loop, and how far samples are believed."""

from __future__ import annotations

from functools import partial

import numpy as np

from mpiddl.decomposition.rows.column_split import Spread, Whole
from mpiddl.decomposition.rows.covariance import Covariance
from mpiddl.decomposition.solvers.auto_choice import start_rows
from mpiddl.decomposition.solvers.base import Enough, Solver, Task
from mpiddl.decomposition.solvers.davidson import Directions, davidson, krylov
from mpiddl.decomposition.solvers.narrowing import LEFT_OUT, SLOWLY, narrowed
from mpiddl.decomposition.solvers.sample import Sample, draw, most_taken, warm_start
from mpiddl.decomposition.solvers.sample_trust import SampleTrust
from mpiddl.decomposition.solvers.subspace import Ritz


class Iterative(Solver):
    """Starts from a sample, and improves the subspace by a pass for each set of directions, which are a solver's own."""

    def spread(self, task: Task) -> Spread:
        """Which rank holds which part of the vectors."""
        return Whole(task.comm, task.rows.d)

    def sample_rows(self, task: Task) -> int:
        """Rows of the first sample."""
        return start_rows(task.n, task.rows.d, task.columns)

    def begin(self, task: Task, operator: Covariance, sample: Sample, most: int) -> tuple[np.ndarray, Directions]:
        """Return vectors to start from, and what finds further directions; a sample has at most ``most`` rows."""
        return self.warm_start(task, operator, sample), krylov

    def warm_start(self, task: Task, operator: Covariance, sample: Sample) -> np.ndarray:
        """Vectors to start from, by passes over the sample."""
        return warm_start(operator.spread, sample, task.columns, task.center, task.seed, task.effort)

    def solve(self, task: Task, done: Enough) -> tuple[Covariance, Ritz]:
        comm, rows, n = task.comm, task.rows, task.n
        most = most_taken(comm, rows)
        drawn = min(most, self.sample_rows(task))
        sample = draw(comm, rows, n, drawn, task.seed, task.effort)
        spread = self.spread(task)
        operator = Covariance(comm, rows, sample.mean, task.center, task.effort, spread=spread)
        start, directions = self.begin(task, operator, sample, most)
        trust = SampleTrust(task, operator, most, drawn, directions, done)
        left_out = SLOWLY if directions is krylov and not task.sparse else LEFT_OUT
        narrow = None if task.files else partial(narrowed, spread, k=task.k, columns=rows.columns, left_out=left_out)
        ritz = davidson(spread, operator.apply, start, trust.directions, trust.done, look=trust, narrow=narrow)
        return operator, ritz._replace(vectors=spread.whole(ritz.vectors))
