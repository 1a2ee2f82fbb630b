"""``mpiexec -n P mpiddl bench pca``: rows dealt to P ranks against all of them on one rank, with one thread and with P.

One rank works while the others wait; then all do, with one thread each; in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpiddl.bench.pca import threads_of_all
from mpiddl.bench.pca_cases import CASES, check_cases
from mpiddl.decomposition import PCA, TruncatedSVD
from mpiddl.layout import block
from mpiddl.machine.clock import now
from mpiddl.study.interleaved import quantiles
from mpiddl.transport import virtual
from mpiddl.transport.comm import Comm


def run(link: Comm, names: Sequence[str], levels: Sequence[float], rounds: int, search: Sequence[Any],
        solvers: Sequence[str], say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Rows, the same on every rank. Collective."""
    check_cases(names, search)
    ours = f"{link.size} ranks x 1 thread"
    for name in names:
        case = CASES[name]
        if link.rank == 0:
            say(f"{name}: making the matrix on every rank")
        x = case.make(search)
        own = block(x.shape[0], link.size, link.rank)
        kind = PCA if case.center else TruncatedSVD

        def fit(comm: Comm, rows: Any, threads: int, solver: str, level: float, kind: Any = kind, k: int = case.k) -> Any:
            return kind(k, solver=solver, tol=level, random_state=0, threads=threads, comm=comm).fit(rows)

        def alone(threads: int, solver: str, level: float, x: Any = x, fit: Any = fit) -> None:
            if link.rank == 0:
                virtual.run(1, lambda comm: fit(comm, x, threads, solver, level))

        def together(threads: int, solver: str, level: float, part: Any = x[own.start : own.stop], fit: Any = fit) -> None:
            fit(link, part, threads, solver, level)

        for solver in solvers:
            for level in levels:
                ways = {ours: (together, 1), "1 rank x 1 thread": (alone, 1),
                        f"1 rank x {link.size} threads": (alone, link.size)}
                seconds: dict[str, list[float]] = {way: [] for way in ways}
                for turn in range(rounds + 1):
                    for way, (run_once, threads) in ways.items():
                        with threads_of_all(threads):  # which takes some milliseconds itself
                            link.Barrier()
                            began = now()
                            run_once(threads, solver, level)
                            link.Barrier()
                            ended = now()
                        if turn:  # the first compiles
                            seconds[way].append(ended - began)
                low, median, high = quantiles(seconds[ours])
                for way in list(ways)[1:]:
                    other = quantiles(seconds[way])[1]
                    yield {
                        "case": f"{name} {x.shape[0]} x {x.shape[1]} k={case.k} {solver} {level:g}",
                        "contender": ours, "baseline": way, "seconds": median, "baseline_seconds": other,
                        "ratio": other / median, "p10": low, "p90": high,
                    }  # fmt: skip
