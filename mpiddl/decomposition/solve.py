"""The one way through all solvers: rows of all ranks in, leading components out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from mpiddl.decomposition.rows.base import Rows
from mpiddl.decomposition.rows.column_split import Whole, spread_for
from mpiddl.decomposition.rows.covariance import Covariance, Effort
from mpiddl.decomposition.rows.dense import DenseRows
from mpiddl.decomposition.rows.files import FileRows
from mpiddl.decomposition.solvers.auto_choice import Choice, choose, sample_rows, start_rows
from mpiddl.decomposition.solvers.error_estimates import at_rounding, missed_variance
from mpiddl.decomposition.solvers.gram import gram
from mpiddl.decomposition.solvers.krylov import Directions, davidson, krylov
from mpiddl.decomposition.solvers.narrowing import LEFT_OUT, SLOWLY, narrowed
from mpiddl.decomposition.solvers.prepare import prepare
from mpiddl.decomposition.solvers.sample import (
    CLOSER,
    HeldOut,
    covariance,
    draw,
    most_taken,
    second_start,
    warm_start,
    warm_start_of,
)
from mpiddl.decomposition.solvers.subsample import Subsample
from mpiddl.decomposition.solvers.subspace import Ritz
from mpiddl.decomposition.solvers.variance_reduced import Settings, VarianceReduced
from mpiddl.decomposition.solvers.vr_plain import vr_plain
from mpiddl.errors import ConvergenceError, UsageError
from mpiddl.machine.clock import now
from mpiddl.transport.agree import agreed

SOLVERS = ("auto", "gram", "subsample", "vr", "vr-plain", "krylov")

FEW = 1 << 18
"""Numbers in the rows of all ranks up to which numpy does: what it loses in a pass, some 10 ms at most, is less than the second
that loading numba and the kernels takes."""

OVERSAMPLES = 2
"""Columns beyond those asked for, at least: the first unwanted one tells the error, the next one that one's."""

FIRST = 1e-4
"""What the first directions may leave of the error, at best."""

UNSEEN = 10.0
"""How much smaller than the tolerance an error has to be after one pass, which may not have met every leading component."""

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

SLOW = 6
"""Passes in which something has to come of it."""

ROUNDING = 4 * float(np.finfo(float).eps)
"""A part of explained variance that is rounding in float64. A smaller tolerance asks for all that passes can find."""


Enough = Callable[[Ritz, np.ndarray, bool], bool]
"""Asked after a pass, with what its components miss, and whether that is to be believed."""


class Moment(NamedTuple):
    """Where a solver stood after a pass: what it had spent, the part of explained variance that it missed, by estimate, and
    the eigenvalues' sum that it had."""

    seconds: float
    passes: float
    rounds: int
    error: float
    explained: float


@dataclass
class Result:
    """Leading components of all ranks' rows; the same on every rank.

    ``components`` (k, d), float64: orthonormal rows, largest variance first, the largest entry of each positive. ``values``
    (k,): the eigenvalues of C; ``errors`` (k,): what they may miss, by estimate. ``mean`` and ``variances`` (d,): of the
    columns. ``n`` rows of weight ``total``.

    Variances (``values``, ``errors``, ``variances``) are in ``unit``^2. It is 1, unless rows are so small (below 1e-120) that
    float64 cannot hold their squares.
    """

    components: np.ndarray
    values: np.ndarray
    errors: np.ndarray
    mean: np.ndarray
    variances: np.ndarray
    n: int
    total: float
    choice: Choice
    effort: Effort
    history: list[Moment] = field(default_factory=list)
    unit: float = 1.0

    def first(self, k: int) -> Result:
        """The same with ``k`` components."""
        return replace(self, components=self.components[:k], values=self.values[:k], errors=self.errors[:k])

    def in_unit(self, unit: float) -> Result:
        """The same with variances in ``unit``^2."""
        factor = self.unit / unit
        history = [moment._replace(explained=moment.explained * factor * factor) for moment in self.history]
        return replace(self, values=self.values * factor * factor, errors=self.errors * factor * factor,
                       variances=self.variances * factor * factor, history=history, unit=unit)


def solve(comm: Any, rows: Rows, k: int, *, solver: str = "auto", tol: float = 1e-8, center: bool = True, seed: int = 0,
          vr: Settings | None = None, most_passes: int = 200, tell: Callable[[Moment], None] | None = None) -> Result:
    """The ``k`` leading principal components.

    Parameters
    ----------
    comm : Comm
    rows : Rows
        Of this rank; none is enough.
    k : int
        From 1 to min(n, d) of all ranks' rows.
    solver : str
        One of `SOLVERS`.
    tol : float
        Stop when the explained variance that is still missed is estimated to be at most this part of it, or when rounding
        in the dtype of the rows hides the rest. 0: when passes find nothing but rounding.
    center : bool
        Subtract the mean.
    tell : callable, optional
        Called on every rank with a `Moment` after every pass.

    Raises
    ------
    UsageError
        A solver that does not exist.
    ConvergenceError
        On every rank: ``tol`` is not met after ``most_passes``, or passes have stopped helping. It carries the best `Result`.

    Communication
    -------------
    Collective; what each solver costs stands on top of its file.
    """
    if solver not in SOLVERS:
        raise UsageError(f"solver: got {solver!r}, expected one of {', '.join(SOLVERS)}")
    began, effort = now(), Effort()
    counts, *kinds = zip(*comm.allgather((rows.n, rows.sparse, isinstance(rows, FileRows))), strict=True)
    n, d = sum(counts), rows.d
    sparse, files = map(any, kinds)
    compiled = n * d > FEW or sparse or files or solver.startswith("vr")
    if compiled:
        with agreed(comm):  # numba may fail to load kernels: all ranks raise together
            import_module("mpiddl.kernels.rows.normal_product")
    if isinstance(rows, DenseRows):
        rows.compiled = compiled  # the same on all ranks, because it decides the number of columns
    columns = min(rows.columns(k + OVERSAMPLES), d)
    if solver.startswith("vr") and sparse:
        raise UsageError(f"solver: got {solver} for sparse rows, expected one of auto, krylov, gram")
    if solver == "vr-plain" and files:
        raise UsageError("solver: got vr-plain for rows in a file, expected one of auto, gram, "
                         "subsample, vr, krylov")
    choice = choose(n, d, k, columns, tol, comm.size, sparse) if solver == "auto" else Choice(solver, "asked for")
    prepared = prepare(comm, rows, n, center, seed)
    rows = prepared.rows
    history: list[Moment] = []

    errors, met = np.zeros(k), True

    def done(ritz: Ritz, missed: np.ndarray, believed: bool) -> bool:
        nonlocal met
        errors[:] = missed
        explained = float(ritz.values[:k].sum())
        error = float(missed.sum()) / explained if explained > 0 else 0.0
        history.append(Moment(now() - began, effort.passes, effort.rounds, error, explained))
        if tell is not None:
            tell(history[-1])
        stuck = solver != "vr-plain" and _stuck(history, tol)  # which is slow by nature
        over = stuck or effort.passes >= most_passes
        near = at_rounding(ritz, k, rows.dtype, 64)  # what is left no pass can find
        met = not over or (stuck and tol <= ROUNDING) or (believed and (error <= tol or near))
        enough = error <= (tol if len(history) > 1 else tol / UNSEEN) or at_rounding(ritz, k, rows.dtype, 0.5)
        return (enough and believed) or over

    task = _Task(comm, rows, n, k, columns, choice.solver, tol, center, seed, vr or Settings(), effort,
                 prepared.floor, sparse, files)
    operator, ritz = _run(task, done, history)
    result = prepared.undone(_result(ritz, errors, operator, n, choice, effort, history))
    if not comm.bcast(met or operator.trace <= prepared.floor):
        raise ConvergenceError(
            f"{choice.solver}: missed about {history[-1].error:.1e} of the explained variance after {effort.passes:.1f} "
            f"passes, expected at most {tol:g}; try a larger `tol` or `max_passes`, or another `solver` (gram is exact)",
            result)
    return result


@dataclass(frozen=True)
class _Task:
    """What `solve` was asked for: ``k`` components of all ranks' ``n`` rows, by blocks of ``columns``; whether any are
    ``sparse``, or in ``files``."""

    comm: Any
    rows: Rows
    n: int
    k: int
    columns: int
    solver: str
    tol: float
    center: bool
    seed: int
    vr: Settings
    effort: Effort
    floor: float
    sparse: bool
    files: bool


def _run(task: _Task, done: Enough, history: list[Moment]) -> tuple[Covariance, Ritz]:
    """Warm up on a sample and iterate, or go the direct way."""
    comm, rows, n, columns, center, seed, effort = (
        task.comm, task.rows, task.n, task.columns, task.center, task.seed, task.effort)  # fmt: skip
    if task.solver == "gram":
        sample = draw(comm, rows, n, 256, seed, effort)
        operator = Covariance(comm, rows, sample.mean, center, effort)
        working = rows.dtype if task.tol >= GRAM_ROUNDING and n > ROWS_OF_SMALL else np.dtype(np.float64)
        return operator, gram(comm, operator, n, task.k, working)
    most = most_taken(comm, rows)
    wanted = (sample_rows if task.solver == "subsample" else start_rows)(n, rows.d, columns)
    sample = draw(comm, rows, n, min(most, wanted), seed, effort)
    spread = spread_for(comm, rows.d, columns) if task.solver == "krylov" else Whole(comm, rows.d)
    operator = Covariance(comm, rows, sample.mean, center, effort, spread=spread)
    if task.solver == "vr-plain":
        return operator, vr_plain(
            comm, operator, task.k,
            lambda ritz: done(ritz, missed_variance(ritz, task.k), True) or operator.trace <= task.floor,
            step=task.vr.step, seed=seed)  # fmt: skip
    products = covariance(comm, sample, center, effort) if task.solver == "subsample" else None
    if products is not None and np.isfinite(products).all():
        start = warm_start_of(comm, products, columns, seed)
        directions: Directions = Subsample(comm, products)
    else:
        start, directions = warm_start(spread, sample, columns, center, seed, effort), krylov
        if task.solver == "vr":
            if task.vr.snapshot < 1:
                start = _from_snapshots(task, min(most, ceil(task.vr.snapshot * n)), start)
            directions = VarianceReduced(operator, task.vr, seed)
    caution = _Caution(task, operator, most, min(most, wanted), directions, history, done)
    left_out = SLOWLY if directions is krylov and not task.sparse else LEFT_OUT
    narrow = None if task.files else partial(narrowed, spread, k=task.k, columns=rows.columns, left_out=left_out)
    ritz = davidson(spread, operator.apply, start, caution.directions, caution.done, look=caution, narrow=narrow)
    return operator, ritz._replace(vectors=spread.whole(ritz.vectors))


class _Caution:
    """Samples save passes where they tell of all rows. Where the first one may not have, nothing is believed before the third
    pass, nor after one that has found much, and the second multiplies what a sample finds that is drawn by the lengths of rows.
    An estimate that a pass has proven wrong is believed no more.

    As the look of `davidson`: at other rows, when the next directions may well suffice.
    """

    def __init__(self, task: _Task, operator: Covariance, most: int, drawn: int, directions: Directions,
                 history: list[Moment], done: Enough):
        self._task, self._operator, self._history = task, operator, history
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


def _from_snapshots(task: _Task, count: int, start: np.ndarray) -> np.ndarray:
    """Iterate with anchors from ``count`` rows, until what they miss of their own components is less than these miss of the
    truth: about trace / (theta_1 count) of the explained variance."""
    spent = Effort()
    sample = draw(task.comm, task.rows, task.n, count, task.seed + 1, task.effort)
    operator = Covariance(task.comm, sample.rows, sample.mean, task.center, spent)

    def enough(ritz: Ritz) -> bool:
        values = ritz.values[: task.k]
        noise = operator.trace / max(values[0], np.finfo(float).tiny) / count
        return missed_variance(ritz, task.k).sum() <= noise * values.sum() or spent.passes >= MOST_SNAPSHOTS

    found = davidson(operator.spread, operator.apply, start, VarianceReduced(operator, task.vr, task.seed + 1), enough)
    task.effort.passes += spent.passes * sample.share
    task.effort.rounds += spent.rounds
    return found.vectors


MOST_SNAPSHOTS = 10
"""Anchors from a part of the rows; where more are needed a gap is so small that a part will not tell."""

ROWS_OF_SMALL = 16_384
"""Fewer rows are multiplied in float64 whatever their dtype: it costs next to nothing."""

GRAM_ROUNDING = 1e-12
"""What a covariance formed in float32 leaves of explained variance: errors of 1e-7 in its entries turn components by as
much, and count squared."""


def _stuck(history: list[Moment], tol: float) -> bool:
    """True if the last passes have neither halved the error nor found a tenth of what may be missed, or only rounding."""
    if len(history) <= SLOW:
        return False
    last, before = history[-1], history[-1 - SLOW]
    return last.error > 0.5 * before.error and last.explained - before.explained < max(0.1 * tol, ROUNDING) * last.explained


def _result(ritz: Ritz, errors: np.ndarray, operator: Covariance, n: int, choice: Choice, effort: Effort,
            history: list[Moment]) -> Result:
    k = len(errors)
    components = ritz.vectors[:, :k].T.copy()
    largest = np.abs(components).argmax(axis=1)
    signs = np.where(components[np.arange(k), largest] < 0, -1.0, 1.0)
    return Result(components * signs[:, None], np.maximum(ritz.values[:k], 0.0), errors, operator.mean, operator.variances, n,
                  operator.total, choice, effort, history)
