"""``mpiddl bench pca``: seconds until so little of the explained variance is missed, ours beside scikit-learn's and SciPy's.

All contenders run on the same matrix with the same threads, in turns, in one process. What each misses is measured after, in
float64, against the exact eigenvalues where the covariance can be formed, else the best of all. A row: at this error,
our solver that reaches it, and the fastest other one that does; ``ratio`` is its median time over ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from scipy.sparse import issparse

from mpiddl import threads as sharing
from mpiddl.bench.pca_cases import CASES, Case
from mpiddl.bench.turns import quantiles
from mpiddl.clock import now
from mpiddl.decomposition import PCA, TruncatedSVD
from mpiddl.errors import ConvergenceError, UsageError
from mpiddl.transport import virtual

EXACT_MOST = 4096
"""Columns up to which the exact eigenvalues are found."""

OURS = {"auto": ("auto",), "all": ("auto", "gram", "subsample", "vr", "krylov")}


@dataclass
class Contender:
    """Somebody's way to components (k, d); what its runs took, and what the last one missed."""

    name: str
    run: Callable[..., np.ndarray]
    ours: bool = False
    level: float = 0.0
    seconds: list[float] = field(default_factory=list)
    error: float = np.nan
    note: str = ""
    found: np.ndarray | None = None


def run(names: Sequence[str], levels: Sequence[float], threads: int, rounds: int, search: Sequence[Any], everyone: bool = False,
        say: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:  # fmt: skip
    """Rows for every case and error level."""
    for name in names:
        if name not in CASES:
            raise UsageError(f"cases: got {name!r}, wanted some of {', '.join(CASES)}")
    rows: list[dict[str, Any]] = []
    with _threads(threads):
        for name in names:
            case = CASES[name]
            say(f"{name}: making the matrix")
            x = case.make(search)
            contenders = [*_ours(case, x, levels, threads, OURS["all" if everyone else "auto"]), *_others(case, x)]
            for contender in contenders:
                if contender.ours:  # compiles what is not in the cache yet
                    contender.run()
            for turn in range(rounds):
                for contender in contenders:
                    if turn == 0 or sum(contender.seconds) < 30:  # of the slow ones two runs are enough
                        _measure(contender)
            _errors(case, x, contenders)
            for contender in contenders:
                median = quantiles(contender.seconds)[1]
                say(f"{name}: {contender.name:<34} {median:8.3f} s  misses {contender.error:.1e}  {contender.note}")
            rows += _rows(case, x, contenders, levels)
    return rows


def _measure(contender: Contender) -> None:
    began = now()
    contender.found = contender.run()
    contender.seconds.append(now() - began)


def _ours(case: Case, x: Any, levels: Sequence[float], threads: int, solvers: Sequence[str]) -> Iterator[Contender]:
    kind = PCA if case.center else TruncatedSVD

    def fit(solver: str, level: float, contender: Contender) -> np.ndarray:
        def program(comm: Any) -> Any:
            model = kind(case.k, solver=solver, tol=level, random_state=0, threads=threads, comm=comm)
            try:
                model.fit(x)
            except ConvergenceError:
                contender.note = "(not to its tolerance)"
            return model

        (model,) = virtual.run(1, program)
        contender.note = contender.note or f"{model.solver_}, {model.n_passes_:.1f} passes"
        return model.components_

    for solver in solvers:
        for level in levels:
            contender = Contender(f"mpiddl {solver} tol={level:g}", np.zeros, True, level)
            contender.run = partial(fit, solver, level, contender)
            yield contender


def _others(case: Case, x: Any) -> Iterator[Contender]:
    import scipy.sparse.linalg
    import sklearn.decomposition as theirs

    def randomized(power: int) -> Callable[[], np.ndarray]:
        if case.center:
            return lambda: theirs.PCA(case.k, svd_solver="randomized", iterated_power=power, random_state=0).fit(x).components_
        return lambda: theirs.TruncatedSVD(case.k, n_iter=power, random_state=0).fit(x).components_

    for power in (1, 2, 4, 7, 12):
        yield Contender(f"scikit-learn randomized q={power}", randomized(power))
    if case.center:
        if x.shape[1] <= EXACT_MOST:
            yield Contender("scikit-learn covariance_eigh",
                            lambda: theirs.PCA(case.k, svd_solver="covariance_eigh").fit(x).components_)
        yield Contender("scikit-learn arpack",
                        lambda: theirs.PCA(case.k, svd_solver="arpack", random_state=0).fit(x).components_)
    else:
        yield Contender("scikit-learn arpack", lambda: theirs.TruncatedSVD(case.k, algorithm="arpack").fit(x).components_)
        yield Contender("scipy svds", lambda: scipy.sparse.linalg.svds(x, case.k, random_state=0)[2])


def _errors(case: Case, x: Any, contenders: Sequence[Contender]) -> None:
    """The part of the best explained variance that each contender's components miss."""
    mean = np.asarray(x.mean(axis=0, dtype=np.float64)).reshape(-1) if case.center else np.zeros(x.shape[1])
    bases = [np.linalg.qr(contender.found.T.astype(np.float64))[0] for contender in contenders if contender.found is not None]
    together = np.concatenate(bases, axis=1)
    explained = np.zeros(together.shape[1])
    moments = np.zeros((x.shape[1],) * 2) if case.center and x.shape[1] <= EXACT_MOST else None
    for begin in range(0, x.shape[0], 10_000):
        part = x[begin : begin + 10_000]
        part = part.astype(np.float64) if issparse(part) else part - mean
        explained += ((part @ together) ** 2).sum(axis=0)
        if moments is not None:
            moments += part.T @ part
    sums = explained.reshape(len(contenders), case.k).sum(axis=1)
    best = float(np.linalg.eigvalsh(moments)[-case.k :].sum()) if moments is not None else sums.max()
    for contender, found in zip(contenders, sums, strict=True):
        contender.error = max(0.0, 1 - found / best)


def _rows(case: Case, x: Any, contenders: Sequence[Contender], levels: Sequence[float]) -> Iterator[dict[str, Any]]:
    for level in levels:
        reach = [contender for contender in contenders if contender.error <= level]
        others = sorted((c for c in reach if not c.ours), key=lambda c: quantiles(c.seconds)[1])
        for own in (c for c in contenders if c.ours and c.level == level):
            if not others or own not in reach:
                continue
            low, seconds, high = quantiles(own.seconds)
            theirs = quantiles(others[0].seconds)[1]
            yield {
                "case": f"{case.name} {x.shape[0]} x {x.shape[1]} k={case.k}, {level:g}", "contender": own.name,
                "baseline": others[0].name,
                "seconds": seconds, "baseline_seconds": theirs, "ratio": theirs / seconds, "p10": low, "p90": high,
                "error": own.error, "baseline_error": others[0].error,
            }  # fmt: skip


@contextmanager
def _threads(count: int) -> Iterator[None]:
    with sharing.apply(sharing.threads_per_rank(count, 1, count)):
        yield
