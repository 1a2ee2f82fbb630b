"""``mpiddl bench pca``: seconds until so little of the explained variance is missed, ours beside everybody else's.

All contenders run on the same matrix with the same threads, in turns. What each misses is measured after, in float64, against
the exact eigenvalues where the covariance can be formed, else the best of all. A row: at this error, our solver that reaches
it, and the fastest other one that does; ``ratio`` is its median time over ours. `vr`, if asked for, also against `krylov`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import issparse

from mpiddl.bench.pca_cases import CASES, Case, check_cases
from mpiddl.bench.pca_peers import EXACT_MOST, Contender, heat, peers
from mpiddl.decomposition import PCA, TruncatedSVD
from mpiddl.errors import ConvergenceError
from mpiddl.machine import threads as sharing
from mpiddl.study.interleaved import quantiles
from mpiddl.transport import virtual
from mpiddl.transport.comm import Comm

EXACT_WORK = 4e12
"""Operations that an exact answer may take; the large file would take ten times as many."""

LEAST = 1e-16
"""Errors are drawn no smaller."""

SLOW_S = 30
"""Contenders that took so long in all are not asked again."""


def run(names: Sequence[str], levels: Sequence[float], threads: int, rounds: int, search: Sequence[Any],
        solvers: Sequence[str] = ("auto",), others: bool = True, python: str = "", folder: Path | None = None,
        say: Callable[[str], None] = lambda text: None, keep: Callable[[str, list[Contender]], None] = lambda name, found: None,
        ) -> list[dict[str, Any]]:  # fmt: skip
    """Rows for every case and error level.

    Without ``others`` only ours take part; ``python`` has Heat; ``folder`` is where a large file lies, or is made; ``keep``
    gets all contenders of a case.
    """
    check_cases(names, search)
    rows: list[dict[str, Any]] = []
    with threads_of_all(threads):
        for name in names:
            case = CASES[name]
            say(f"{name}: making the matrix")
            x = case.make([*search, *([str(folder)] if folder else [])])
            with heat(python, case, x, threads) as heats:
                libraries = [*peers(case, x), *heats] if others else []
                contenders = [*_ours(case, x, levels, threads, solvers), *libraries]
                if isinstance(x, np.memmap):
                    _read_once(x)
                for contender in contenders:
                    if contender.ours and not isinstance(x, np.memmap):  # compiles what is not in the cache yet
                        contender.run()
                for turn in range(rounds):
                    for contender in contenders:
                        if turn == 0 or sum(contender.seconds) < SLOW_S:
                            contender.measure()
            _errors(case, x, contenders)
            for contender in contenders:
                median = quantiles(contender.seconds)[1]
                say(f"{name}: {contender.name:<42} {median:8.3f} s  misses {contender.error:.1e}  {contender.note}")
            rows += _rows(case, x, contenders, levels)
            keep(name, contenders)
    return rows


def _read_once(x: np.memmap) -> None:
    """What the system can keep of a file it then has, whoever comes first."""
    with open(str(x.filename), "rb", buffering=0) as file:
        room = bytearray(1 << 24)
        while file.readinto(room):
            pass


def _ours(case: Case, x: Any, levels: Sequence[float], threads: int, solvers: Sequence[str]) -> Iterator[Contender]:
    kind = PCA if case.center else TruncatedSVD

    def fit(solver: str, level: float, contender: Contender) -> np.ndarray:
        def program(comm: Comm) -> Any:
            model = kind(case.k, solver=solver, tol=level, random_state=0, threads=threads, comm=comm)
            try:
                model.fit(x)
            except ConvergenceError:
                contender.note = "(not to its tolerance)"
            return model

        (model,) = virtual.run(1, program)
        contender.note = contender.note or f"{model.solver_}, {model.n_passes_:.1f} passes"
        contender.history = model.history_
        return model.components_

    for solver in solvers:
        for level in levels:
            contender = Contender(f"mpiddl {solver} tol={level:g}", lambda: None, True, level, solver)
            contender.run = partial(fit, solver, level, contender)
            yield contender


def _errors(case: Case, x: Any, contenders: Sequence[Contender]) -> None:
    """The part of the best explained variance that each contender's components miss."""
    mean = np.asarray(x.mean(axis=0, dtype=np.float64)).reshape(-1) if case.center else np.zeros(x.shape[1])
    bases = [np.linalg.qr(contender.found.T.astype(np.float64))[0] for contender in contenders if contender.found is not None]
    together = np.concatenate(bases, axis=1)
    explained = np.zeros(together.shape[1])
    exact = case.center and x.shape[1] <= EXACT_MOST and 2 * x.shape[0] * x.shape[1] ** 2 <= EXACT_WORK
    moments = np.zeros((x.shape[1],) * 2) if exact else None
    for begin in range(0, x.shape[0], 10_000):
        part = x[begin : begin + 10_000]
        part = part.astype(np.float64) if issparse(part) else part - mean
        explained += ((part @ together) ** 2).sum(axis=0)
        if moments is not None:
            moments += part.T @ part
    sums = explained.reshape(len(contenders), case.k).sum(axis=1)
    best = float(np.linalg.eigvalsh(moments)[-case.k :].sum()) if moments is not None else sums.max()
    for contender, found in zip(contenders, sums, strict=True):
        contender.error, contender.best = max(0.0, 1 - found / best), best / x.shape[0]


def _rows(case: Case, x: Any, contenders: Sequence[Contender], levels: Sequence[float]) -> Iterator[dict[str, Any]]:
    what = f"{case.name} {x.shape[0]} x {x.shape[1]} k={case.k}"
    for level in levels:
        reach = [contender for contender in contenders if contender.error <= level]
        own = {contender.solver: contender for contender in reach if contender.ours and contender.level == level}
        for libraries in (("scikit-learn", "scipy"), ("Heat",)):
            others = [c for c in reach if c.name.startswith(libraries)]
            if others:
                fastest = min(others, key=lambda c: quantiles(c.seconds)[1])
                yield from (_row(f"{what}, {level:g}", contender, fastest) for contender in own.values())
        if {"vr", "krylov"} <= own.keys():
            yield _row(f"{what}, {level:g}", own["vr"], own["krylov"])


def _row(what: str, own: Contender, other: Contender) -> dict[str, Any]:
    (low, seconds, high), (_, theirs, _) = quantiles(own.seconds), quantiles(other.seconds)
    return {
        "case": what, "contender": own.name, "baseline": other.name, "seconds": seconds, "baseline_seconds": theirs,
        "ratio": theirs / seconds, "p10": low, "p90": high, "error": own.error, "baseline_error": other.error,
    }  # fmt: skip


@contextmanager
def threads_of_all(count: int) -> Iterator[None]:
    """So many threads for everybody's products."""
    with sharing.apply(sharing.threads_per_rank(count, 1, count)):
        yield


def draw(path: Path, found: dict[str, list[Contender]]) -> None:
    """Error over seconds, passes and rounds, a line of panels for each case: ours pass by pass, the others where they ended."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6 * len(found)), layout="constrained")
    grid = figure.subplots(len(found), 3, sharey="row", squeeze=False)
    for line, (name, contenders) in zip(grid, found.items(), strict=True):
        sharpest = min(contender.level for contender in contenders if contender.ours)
        for number, contender in enumerate(c for c in contenders if not c.ours or c.level == sharpest):
            colour = colormaps["tab20"](number % 20)
            if contender.ours:
                _draw_own(line, contender, colour)
                continue
            place = max(contender.error, LEAST)
            line[0].plot(quantiles(contender.seconds)[1], place, "x", color=colour, label=contender.name)
            if contender.note.endswith("passes"):
                line[1].plot(float(contender.note.split()[0]), place, "x", color=colour)
        line[0].legend(fontsize=6)
        line[0].set(ylabel=f"{name}: missed part of explained variance", xlabel="seconds", xscale="log", yscale="log")
        line[1].set(xlabel="passes over the data", xscale="log")
        line[2].set(xlabel="rounds of communication")
    figure.savefig(path, dpi=110)


def _draw_own(line: Any, contender: Contender, colour: Any) -> None:
    """What was missed after each pass, from the eigenvalues' sum that a solver had."""
    errors = [max(1 - moment.explained / contender.best, LEAST) for moment in contender.history]
    errors[-1:] = [max(contender.error, LEAST)] * bool(errors)
    for axes, quantity in zip(line, ("seconds", "passes", "rounds"), strict=True):
        values = [getattr(moment, quantity) for moment in contender.history]
        axes.plot(values, errors, "o-", ms=3, color=colour, label=contender.name)
