"""Base of `PrincipalComponents` and `SingularVectors`: takes the rows of all ranks to a `Result`.

scikit-learn is not needed here: ``mpiddl pca`` takes half the time without it. `Estimator` adds its conventions.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import signature
from numbers import Integral
from typing import Any

import numpy as np

from mpiddl.data.matrix import is_sparse
from mpiddl.decomposition.completion import completed
from mpiddl.decomposition.rows.base import Rows
from mpiddl.decomposition.rows.covariance import NotFinite
from mpiddl.decomposition.rows.dense import DenseRows
from mpiddl.decomposition.rows.files import FileRows
from mpiddl.decomposition.rows.sparse import SparseRows
from mpiddl.decomposition.rows_of_all import OWN, check_rows
from mpiddl.decomposition.solve import Result, made, solve
from mpiddl.decomposition.solvers.base import Moment
from mpiddl.decomposition.solvers.gram import SMALL
from mpiddl.decomposition.solvers.settings import Settings
from mpiddl.decomposition.stream import merged
from mpiddl.errors import ConvergenceError, DataError, UsageError
from mpiddl.machine.clock import now
from mpiddl.memory import keep_freed
from mpiddl.node.cores import limited_threads
from mpiddl.transport.agree import agreed_errors, check_equal
from mpiddl.transport.comm import AnyComm, Comm
from mpiddl.transport.mpi import connected

GRAM_MOST = 2048
"""Columns (or rows) up to which a wanted share of variance is answered from the whole spectrum."""

Place = Callable[[int, int], str]


def _place(row: int, column: int) -> str:
    """What an entry of this rank's rows is called."""
    return f"row {row}, column {column}"


class Decomposition(ABC):
    """A decomposition of rows that solvers take as they are: `FileRows`, a C-contiguous array or a CSR matrix of floats."""

    _center = True
    rows = OWN

    def __init__(self, n_components: Any, solver: str, tol: float, random_state: Any, comm: AnyComm | None, threads: int,
                 vr_fraction: float, batch_size: int | None, step_size: float, sync_every: int | None, sync_delay: int,
                 snapshot_fraction: float, max_passes: Any):
        self.n_components = n_components
        self.solver = solver
        self.tol = tol
        self.random_state = random_state
        self.comm = comm
        self.threads = threads
        self.vr_fraction = vr_fraction
        self.batch_size = batch_size
        self.step_size = step_size
        self.sync_every = sync_every
        self.sync_delay = sync_delay
        self.snapshot_fraction = snapshot_fraction
        self.max_passes = max_passes

    def _fit(self, X: Any, sample_weight: Any = None, *, tell: Callable[[Moment], None] | None = None, place: Place = _place,
             after: Result | None = None, stream: bool = False) -> None:
        """`Estimator.fit`, or with ``stream`` `partial_fit` after a result; ``tell`` hears of every pass."""
        keep_freed()
        with connected(self.comm, os.environ) as link:
            began, sent, held_up = now(), link.meter.bytes, link.meter.seconds
            X, sample_weight = self._divided(link, X, sample_weight)
            with agreed_errors(link):
                self._check_settings()
                rows = self._own_rows(X, sample_weight, link.size, after is None)
                seed = self._seed(link.rank)
                if stream and rows.sparse:
                    raise UsageError("X: got a sparse batch, expected a dense batch for partial_fit")
            check_equal(link, "X", {"columns": rows.d, "dtype": str(rows.dtype), "sample_weight": sample_weight is not None,
                                    "feature names": self._names()})
            check_equal(link, type(self).__name__, {"": type(self).__name__, **self._settings_of_all()})
            seed = link.bcast(seed)
            if rows.d > SMALL:
                import_module("scipy.linalg")  # now, because the threads of a BLAS that is loaded later are not limited
            with limited_threads(link, self.threads, os.environ) as (threads, _):
                rows.threads = threads
                try:
                    result = self._merge(link, rows, seed, after) if stream else self._solve(link, rows, seed, tell)
                except NotFinite:
                    with agreed_errors(link):
                        _find_bad(rows, place)
                    raise DataError("Input X contains values too large to be squared: their variance is infinite") from None
                except ConvergenceError as error:
                    assert isinstance(error.best, Result)
                    self._take(self._part(error.best) if stream else error.best, rows.dtype)
                    raise
                finally:
                    self.seconds_, self.n_bytes_ = now() - began, link.meter.bytes - sent
                    self.communication_seconds_ = max(link.meter.seconds - held_up, 0.0)
        self._stream = result if stream else None
        self._take(self._part(result) if stream else result, rows.dtype)

    def _divided(self, link: Comm, X: Any, sample_weight: Any) -> tuple[Any, Any]:
        """This rank's rows of what was passed."""
        return X, sample_weight

    def _check_settings(self) -> None:
        check_rows(self.rows)
        made(self.solver)
        if not _is_number(self.tol) or not 0 <= self.tol < 1:
            raise UsageError(f"tol: got {self.tol!r}, expected a number from 0 to below 1")
        if not _is_number(self.max_passes) or not self.max_passes > 0:
            raise UsageError(f"max_passes: got {self.max_passes!r}, expected a number above 0")
        if isinstance(self.threads, bool) or not isinstance(self.threads, Integral) or self.threads < 0:
            raise UsageError(f"threads: got {self.threads!r}, expected a whole number, 0 or more")
        self._settings().check()

    def _settings(self) -> Settings:
        return Settings(self.vr_fraction, self.batch_size, self.step_size, self.sync_every, self.sync_delay,
                        self.snapshot_fraction)

    def _own_rows(self, X: Any, sample_weight: Any, ranks: int, reset: bool = True) -> Rows:
        """This rank's rows."""
        self.n_features_in_ = X.d if isinstance(X, FileRows) else X.shape[1]
        if isinstance(X, FileRows):
            return X
        return SparseRows(X) if is_sparse(X) else DenseRows(np.ascontiguousarray(X))

    def _settings_of_all(self) -> dict[str, Any]:
        """Parameters that have to be the same on every rank."""
        own = ("comm", "random_state", "threads")
        return {name: getattr(self, name) for name in _parameters(type(self)) if name not in own}

    def _names(self) -> list[str] | None:
        names = getattr(self, "feature_names_in_", None)
        return None if names is None else list(names)

    def _seed(self, rank: int) -> int | None:
        """Of all random numbers, on rank 0. Every rank draws, so that a generator of the program stays alike on all."""
        seed = self._random().randint(2**31 - 1)
        return seed if rank == 0 else None

    def _random(self) -> np.random.RandomState:
        return np.random.RandomState(self.random_state)

    def _solve(self, link: Comm, rows: Rows, seed: int, tell: Callable[[Moment], None] | None) -> Result:
        """As many components as are wanted."""
        n, total = _count(link, rows)
        least = min(n, rows.d)
        wanted = self._wanted(counted(n, total), rows.d)
        self._check_total(total)
        settings: dict[str, Any] = {
            "solver": self.solver, "tol": self.tol, "center": self._center, "seed": seed, "vr": self._settings(),
            "most_passes": self.max_passes, "tell": tell,
        }  # fmt: skip
        if isinstance(wanted, int):
            try:
                return completed(solve(link, rows, min(wanted, least), **settings), wanted)
            except ConvergenceError as error:
                raise ConvergenceError(str(error), completed(error.best, wanted)) from None
        k = least if least <= GRAM_MOST or self.solver == "gram" else 16
        while True:
            result = solve(link, rows, k, **settings)
            total = result.variances.sum()
            enough = int(np.searchsorted(np.cumsum(result.values), wanted * total, side="right")) + 1
            if enough <= k or k == least:
                return result.first(min(enough, k))
            k = min(2 * k, least)

    def _merge(self, link: Comm, rows: Rows, seed: int, after: Result | None) -> Result:
        """All batches so far."""
        if isinstance(rows, FileRows):
            rows = rows.take(np.arange(rows.n))
        assert isinstance(rows, DenseRows)
        n, total = _count(link, rows)
        all_n, all_total = (n + after.n, total + after.total) if after else (n, total)
        k = self._wanted(counted(all_n, all_total), rows.d)
        self._check_total(all_total)
        if not isinstance(k, int) or (after is None and k > n and self.n_components is not None):
            raise UsageError(f"n_components: got {self.n_components!r}, expected a whole number for partial_fit, at "
                             "most the number of rows in the first batch")
        return merged(link, rows, after, k, self._center, solver=self.solver, tol=self.tol, seed=seed, vr=self._settings(),
                      most_passes=self.max_passes)

    def _check_total(self, total: float) -> None:  # noqa: B027
        """Refuse weights that nothing can be said of."""

    def _part(self, result: Result) -> Result:
        """As many components as are wanted of all batches."""
        wanted = int(self._wanted(counted(result.n, result.total), self.n_features_in_))
        return completed(result.first(wanted), wanted)

    @abstractmethod
    def _wanted(self, n: int, d: int) -> int | float:
        """Components wanted of ``n`` rows (`counted`) of ``d`` columns, or the share of variance."""

    @abstractmethod
    def _take(self, result: Result, dtype: np.dtype) -> None:
        """scikit-learn's attributes from a result."""

    def _remember(self, result: Result, dtype: np.dtype) -> None:
        """The attributes that both estimators have."""
        self.components_ = result.components.astype(dtype)
        self.singular_values_ = (np.sqrt(result.values * result.total) * result.unit).astype(dtype)
        self.n_components_, self.n_samples_ = len(result.values), result.n
        self.solver_, self.why_ = result.choice
        self.n_passes_, self.n_rounds_ = result.effort.passes, result.effort.rounds
        self.history_ = result.history


def counted(n: int, total: float) -> int:
    """How many rows ``n`` rows of weight ``total`` stand for: a row of weight 3 for three, one of weight 0.5 for itself.

    Examples
    --------
    >>> counted(9, 27.0), counted(9, 4.5)
    (27, 9)
    """
    return max(n, int(total * (1 + 1e-9)))


def variances_in(dtype: np.dtype, values: np.ndarray, unit: float) -> np.ndarray:
    """Variances in ``unit``^2 as they are; in ``dtype`` if it holds them, else in float64: it squares what the rows are."""
    values, limits = values * unit * unit, np.finfo(dtype)
    largest = values.max(initial=0.0)
    fits = largest == 0 or limits.tiny / limits.eps <= largest <= limits.max
    return values.astype(dtype) if fits else values


@cache
def _parameters(kind: type[Decomposition]) -> tuple[str, ...]:
    """What its constructor takes by name, as scikit-learn counts it: neither ``*args`` nor ``**kwargs``."""
    listed = signature(kind).parameters.values()
    return tuple(one.name for one in listed if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))


def _count(link: Comm, rows: Rows) -> tuple[int, float]:
    """Rows of all ranks, and their weight."""
    left_out = rows.numbers is not None and not len(rows.numbers)  # rows, all of weight 0
    n, total, without = map(sum, zip(*link.allgather((rows.n, rows.total, left_out)), strict=True))
    if not n and not without:
        raise UsageError("X: got 0 rows on all ranks, expected one or more")
    if not total:
        raise UsageError("X: got no row with a sample_weight above zero on any rank, expected one or more")
    return n, total


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _find_bad(rows: Rows, place: Place) -> None:
    """Say where the first entry is that is not finite, in words that begin as scikit-learn's."""
    begin, numbers = 0, rows.numbers
    for block, _ in rows.blocks(4096):
        bad = np.argwhere(~np.isfinite(block))
        if len(bad):
            row, column = bad[0]
            what = "NaN" if np.isnan(block[row, column]) else "infinity"
            number = begin + row if numbers is None else numbers[begin + row]
            raise ValueError(f"Input X contains {what}: {place(number, column)}")
        begin += len(block)


