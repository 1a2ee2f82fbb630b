"""Whether a sample tells of all rows, and what is believed where it may not."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import numpy as np

from mpiddl.decomposition.rows.covariance import Covariance
from mpiddl.decomposition.solvers.auto_choice import start_rows
from mpiddl.decomposition.solvers.base import Enough, Task
from mpiddl.decomposition.solvers.davidson import Directions
from mpiddl.decomposition.solvers.error_estimates import missed_variance
from mpiddl.decomposition.solvers.sample import CLOSER, HeldOut, second_start
from mpiddl.decomposition.solvers.subspace import Ritz

FIRST = 1e-4
"""What the first directions may leave of the error, at best."""

HOPE = 30
"""How much better than the last ones directions may be: a look costs a thirtieth of a pass."""

ALIKE = 4
"""Rows of a sample for each (largest |x|^2 / lambda_k), so that the sum over them is like that over all, whatever the rows
are: by matrix Bernstein its relative error goes with the root of that ratio (J. Tropp, Found. Trends Mach. Learn. 8, 2015,
doi:10.1561/2200000048, theorem 6.6.1; the constant is ours)."""

FLAT = 4
"""Times the average variance of all components, from which on one stands out."""

BELIEVED = 2
"""Passes, more than which it takes to believe anything where the first sample did not tell of all rows."""

LIKE_THAT = 3
"""Passes, after one that found more than was expected."""

SAMPLED = 2.0
"""How much smaller than the tolerance an error has to be that a sample tells."""


class SampleTrust:
    """Samples save passes where they tell of all rows. Where the first one may not have, nothing is believed before the third
    pass, nor after one that has found much, and the second multiplies what a sample finds that is drawn by the lengths of rows.
    An estimate that a pass has proven wrong is believed no more.

    As the look of `davidson`: at other rows, when the next directions may well suffice.
    """

    def __init__(self, task: Task, operator: Covariance, most: int, drawn: int, directions: Directions, done: Enough):
        self._task, self._operator, self._history = task, operator, task.history
        self._held_out = HeldOut(operator, task.n, most, task.columns, task.seed)
        self._most, self._drawn, self._directions, self._done = most, drawn, directions, done
        self._told, self._found, self._before, self._said, self._short_by = False, 0.0, 0.0, 0.0, np.inf

    def directions(self, ritz: Ritz) -> np.ndarray:
        """Those of the solver; after the first pass, where that is needed, those of a second start, and some at random where
        only chance meets what is missing."""
        if len(self._history) > 1 or self._told:
            return self._directions(ritz)
        task = self._task
        wanted = max(start_rows(task.n, task.rows.d, task.columns), ceil(2 * ALIKE * self._stiffness(ritz)))
        found = second_start(self._operator, task.n, min(task.n, self._most, wanted), task.columns, task.seed)
        if self._flat(ritz):
            found[:, task.columns // 2 :] = self._operator.spread.random(task.columns, task.seed + 7)[:, task.columns // 2 :]
        return found

    def done(self, ritz: Ritz) -> bool:
        """Whether the tolerance is met, or nothing helps."""
        explained = float(ritz.values[: self._task.k].sum())
        if self._history:
            self._found = explained - self._history[-1].explained - np.finfo(self._task.rows.dtype).eps * explained
            self._before = self._said
        else:
            self._told = self._tells(self._drawn, self._operator.heaviness, ritz)
        missed = missed_variance(ritz, self._task.k)
        self._said = float(missed.sum())
        settled = len(self._history) >= BELIEVED and LIKE_THAT * self._found <= self._task.tol * explained
        return self._done(ritz, self._corrected(missed), self._told or settled) or self.trace <= self._task.floor

    def _corrected(self, missed: np.ndarray) -> np.ndarray:
        """What is missed by estimate. If the last pass has found more than was said before it, this is as many times wrong, but
        by no more than some passes like that would find."""
        said, surplus = max(float(missed.sum()), np.finfo(float).tiny), self._found - self._before
        if surplus <= 0:
            return missed
        return missed * min(self._found / max(self._before, np.finfo(float).tiny), 1 + LIKE_THAT * surplus / said)

    def _tells(self, count: int, heaviness: float, ritz: Ritz) -> bool:
        """Whether so many rows tell of all; the same on every rank."""
        return count >= ALIKE * heaviness * self._stiffness(ritz) and not self._flat(ritz)

    def _flat(self, ritz: Ritz) -> bool:
        """Whether the last wanted component has hardly more variance than the average one: then a sample tells which rows it
        has, and not which components are the largest."""
        return FLAT * self._stiffness(ritz) > min(self._task.n, self._task.rows.d)

    def _stiffness(self, ritz: Ritz) -> float:
        least = max(ritz.values[self._task.k - 1], self.trace / self._task.n)
        return self.trace / least if least > 0 else self._task.n

    @property
    def trace(self) -> float:
        return self._operator.trace

    def __call__(self, block: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return self._held_out(block)

    def worth(self, ritz: Ritz) -> bool:
        before, last = self._history[-2].error if len(self._history) > 1 else np.inf, self._history[-1].error
        hoped = last * (min(last / before, 0.1) / HOPE if before < np.inf else FIRST)
        believed = self._told or len(self._history) > BELIEVED
        return believed and hoped <= self._task.tol and self._tells(self._held_out.count, 1.0, ritz)

    def convinced(self, ritz: Ritz) -> bool:
        k = self._task.k
        missed = self._corrected(missed_variance(ritz, k))
        self._short_by = missed.sum() / (self._task.tol / SAMPLED * ritz.values[:k].sum() or np.finfo(float).tiny)
        return self._short_by <= 1 and self._done(ritz, missed, True)

    def nearly(self, ritz: Ritz) -> bool:
        return self._short_by <= 1 + CLOSER  # if all that is missed is the sample's fault, more rows will do
