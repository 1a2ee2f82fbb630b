"""The one way through all solvers: rows of all ranks in, leading components out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module

import numpy as np

from mpiddl.decomposition.rows.base import Rows
from mpiddl.decomposition.rows.covariance import Covariance, Effort
from mpiddl.decomposition.rows.dense import DenseRows
from mpiddl.decomposition.rows.files import FileRows
from mpiddl.decomposition.solvers.auto_choice import Choice, choose
from mpiddl.decomposition.solvers.base import Moment, Solver, Task
from mpiddl.decomposition.solvers.error_estimates import at_rounding
from mpiddl.decomposition.solvers.prepare import prepare
from mpiddl.decomposition.solvers.settings import Settings
from mpiddl.decomposition.solvers.subspace import Ritz
from mpiddl.errors import ConvergenceError, UsageError
from mpiddl.machine.clock import now
from mpiddl.registry import SOLVERS
from mpiddl.transport.agree import agreed
from mpiddl.transport.comm import Comm
from mpiddl.user_code import is_reference

FEW = 1 << 18
"""Numbers in the rows of all ranks up to which numpy does: what it loses in a pass, some 10 ms at most, is less than the second
that loading numba and the kernels takes."""

OVERSAMPLES = 2
"""Columns beyond those asked for, at least: the first unwanted one tells the error, the next one that one's."""

UNSEEN = 10.0
"""How much smaller than the tolerance an error has to be after one pass, which may not have met every leading component."""

SLOW = 6
"""Passes in which something has to come of it."""

ROUNDING = 4 * float(np.finfo(float).eps)
"""A part of explained variance that is rounding in float64. A smaller tolerance asks for all that passes can find."""


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


def solve(comm: Comm, rows: Rows, k: int, *, solver: str = "auto", tol: float = 1e-8, center: bool = True, seed: int = 0,
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
        ``auto``, one of `SOLVERS`, or ``module:Class``.
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
    asked, began, effort = made(solver), now(), Effort()
    counts, *kinds = zip(*comm.allgather((rows.n, rows.sparse, isinstance(rows, FileRows))), strict=True)
    n, d = sum(counts), rows.d
    sparse, files = map(any, kinds)
    compiled = n * d > FEW or sparse or files or (asked is not None and asked.compiled)
    if compiled:
        with agreed(comm):  # numba may fail to load kernels: all ranks raise together
            import_module("mpiddl.kernels.rows.normal_product")
    if isinstance(rows, DenseRows):
        rows.compiled = compiled  # the same on all ranks, because it decides the number of columns
    columns = min(rows.columns(k + OVERSAMPLES), d)
    for kind, unfit, rows_are in (("sparse", sparse, "sparse rows"), ("files", files, "rows in a file")):
        if asked is not None and unfit and not getattr(asked, kind):
            fit = ", ".join(["auto", *(name for name in SOLVERS if getattr(SOLVERS.find(name), kind, False))])
            raise UsageError(f"solver: got {solver} for {rows_are}, expected one of {fit}")
    choice = choose(n, d, k, columns, tol, comm.size, sparse) if asked is None else Choice(solver, "asked for")
    method: Solver = asked or SOLVERS.make(choice.solver)
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
        stuck = not method.slow and _stuck(history, tol)
        over = stuck or effort.passes >= most_passes
        near = at_rounding(ritz, k, rows.dtype, 64)  # what is left no pass can find
        met = not over or (stuck and tol <= ROUNDING) or (believed and (error <= tol or near))
        enough = error <= (tol if len(history) > 1 else tol / UNSEEN) or at_rounding(ritz, k, rows.dtype, 0.5)
        return (enough and believed) or over

    task = Task(comm, rows, n, k, columns, tol, center, seed, vr or Settings(), effort, prepared.floor, sparse, files, history)
    operator, ritz = method.solve(task, done)
    if not (np.isfinite(ritz.vectors).all() and np.isfinite(ritz.values).all()):
        raise UsageError(f"solver: {choice.solver} returned components that are not finite, expected finite ones")
    result = prepared.undone(_result(ritz, errors, operator, n, choice, effort, history))
    if not comm.bcast(met or operator.trace <= prepared.floor):
        raise ConvergenceError(
            f"{choice.solver}: missed about {history[-1].error:.1e} of the explained variance after {effort.passes:.1f} "
            f"passes, expected at most {tol:g}; try a larger `tol` or `max_passes`, or another `solver` (gram is exact)",
            result)
    return result


def made(spec: str) -> Solver | None:
    """The solver that ``spec`` names, or the object of a class of the user's own; None for ``auto``.

    Raises
    ------
    UsageError
        On every rank: an unknown name, or something that is no solver.
    """
    if spec == "auto":
        return None
    if not isinstance(spec, str):
        raise UsageError(f"solver: got {spec!r}, expected one of {', '.join(['auto', *SOLVERS])}, or MODULE:CLASS")
    if not is_reference(spec):
        SOLVERS.check(spec, "auto")
    solver = SOLVERS.make(spec)
    if not isinstance(solver, Solver):
        raise UsageError(f"solver: got {type(solver).__name__}, expected a class derived from "
                         "mpiddl.decomposition.solvers.base.Solver")
    return solver


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
