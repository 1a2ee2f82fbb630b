"""Fits of `MLPClassifier` against scikit-learn's: the same data, parameters, seeds and threads, in turns.

A sample is a whole fit, divided by its steps. ``limit_seconds``: what the products of a step take at the rate of numpy's BLAS
on a large square matrix, measured in the same run. ``products`` is that part of our step. ``accuracy`` is ours on the test
rows, and ``baseline_accuracy`` scikit-learn's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpiddl.data import open_data
from mpiddl.errors import UsageError
from mpiddl.machine import threads as sharing
from mpiddl.machine.clock import now
from mpiddl.transport import virtual
from mpiddl.transport.comm import Comm

SQUARE, SQUARE_TIMES = 1024, 5
"""The product whose rate is the limit: as large as fits the caches of a core."""


class Case(NamedTuple):
    """Parameters of a fit, on the first ``rows`` rows of a data set."""

    data: str = "fashion-mnist"
    rows: int = 60_000
    epochs: int = 2
    dtype: str = "float32"
    settings: dict[str, Any] = {"hidden_layer_sizes": (100,)}


CASES = {
    "batch-200": Case(),
    "batch-32": Case(rows=20_000, settings={"hidden_layer_sizes": (100,), "batch_size": 32}),
    "batch-2000": Case(settings={"hidden_layer_sizes": (100,), "batch_size": 2000}),
    "two-layers": Case(rows=30_000, settings={"hidden_layer_sizes": (256, 128)}),
    "narrow": Case(settings={"hidden_layer_sizes": (10,)}),
    "float64": Case(rows=30_000, dtype="float64"),
    "sgd": Case(settings={"hidden_layer_sizes": (100,), "solver": "sgd"}),
    "tanh": Case(rows=30_000, settings={"hidden_layer_sizes": (100,), "activation": "tanh"}),
    "logistic": Case(rows=30_000, settings={"hidden_layer_sizes": (100,), "activation": "logistic"}),
    "lbfgs": Case(rows=10_000, epochs=10, settings={"hidden_layer_sizes": (100,), "solver": "lbfgs"}),
    "early-stopping": Case(rows=20_000, settings={"hidden_layer_sizes": (100,), "early_stopping": True}),
    "digits": Case("digits", 1437, 30),
    "digits-lbfgs": Case("digits", 1437, 50, "float64", {"hidden_layer_sizes": (100,), "solver": "lbfgs"}),
    "tall": Case("tall", 100_000, 2),
    "wide": Case("wide", 1000, 4),
}
"""By name. tall and wide are random numbers: 10 columns, and 20,000."""


def run(names: Sequence[str], search: Sequence[Any], threads: int = 1, rounds: int = 5,
        say: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each case.

    Parameters
    ----------
    names : sequence of str
        Of `CASES`.
    search : sequence of path
        Folders with data sets.
    threads : int
        Threads of either side.
    rounds : int
        Fits of either side, each with a seed of its own.

    Raises
    ------
    UsageError
        If there is no such case or data set.
    """
    for name in names:
        if name not in CASES:
            raise UsageError(f"cases: got {name!r}, expected one or more of {', '.join(CASES)}")
    rows: list[dict[str, Any]] = []
    with sharing.apply(sharing.Threads(threads, threads, "flag")):
        for name in names:
            say(f"{name}: {rounds} rounds")
            rows += virtual.run(1, partial(_measure, name=name, search=search, threads=threads, rounds=rounds))
    return rows


def load(case: Case, search: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows and classes to train on, rows and classes to test with."""
    if case.data in ("tall", "wide"):
        rng, d = np.random.default_rng(0), 10 if case.data == "tall" else 20_000
        x = rng.standard_normal((case.rows, d)).astype(case.dtype)
        y = np.digitize(x[:, 0], [-1, 0, 1])
        return x, y, x, y
    data = open_data(case.data, search)
    parts: list[np.ndarray] = []
    for rows in (data.train, data.test or data.train):
        [(x, y)] = rows.read([range(min(rows.n, case.rows))])
        parts += [np.asarray(x, case.dtype) / np.array(x.max(), case.dtype), np.asarray(y)]
    return parts[0], parts[1], parts[2], parts[3]


def _measure(comm: Comm, name: str, search: Sequence[Any], threads: int, rounds: int) -> dict[str, Any]:
    from sklearn.neural_network import MLPClassifier as Theirs

    from mpiddl.neural_network import MLPClassifier as Ours

    case = CASES[name]
    x, y, x_test, y_test = load(case, search)
    seconds: dict[str, list[float]] = {"mpiddl": [], "scikit-learn": []}
    accuracy: dict[str, list[float]] = {"mpiddl": [], "scikit-learn": []}
    settings = {"max_iter": case.epochs, **case.settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Ours(comm=comm, threads=threads, **settings).fit(x[:400], y[:400])  # compiles what is not in the cache
        for turn in range(rounds):
            models = {"mpiddl": Ours(comm=comm, threads=threads, **settings), "scikit-learn": Theirs(**settings)}
            for who in list(models)[:: 1 if turn % 2 else -1]:
                model = models[who].set_params(random_state=turn)
                begin = now()
                model.fit(x, y)
                seconds[who].append((now() - begin) / _steps(case, model))
                accuracy[who].append(float(model.score(x_test, y_test)))
    return _row(name, case, seconds, accuracy, x.shape[1], len(np.unique(y)))


def _steps(case: Case, model: Any) -> int:
    """Steps of a fit; of L-BFGS, iterations."""
    if model.solver == "lbfgs":
        return model.n_iter_
    return model.n_iter_ * -(-(model.t_ // model.n_iter_) // _batch(case))


def _batch(case: Case) -> int:
    if case.settings.get("solver") == "lbfgs":
        return case.rows
    return min(case.settings.get("batch_size", 200), case.rows)


def _row(name: str, case: Case, seconds: dict[str, list[float]], accuracy: dict[str, list[float]], columns: int,
         classes: int) -> dict[str, Any]:
    sizes = (columns, *case.settings["hidden_layer_sizes"], classes)
    products = [2.0 * _batch(case) * n * m for n, m in pairwise(sizes)]
    median = {who: float(np.median(found)) for who, found in seconds.items()}
    ratios = np.array(seconds["scikit-learn"]) / np.array(seconds["mpiddl"])
    limit = (3 * sum(products) - products[0]) / _rate(case.dtype)
    return {
        "case": name, "contender": "mpiddl", "baseline": "scikit-learn",
        "seconds": median["mpiddl"], "baseline_seconds": median["scikit-learn"], "ratio": float(np.median(ratios)),
        "least_ratio": float(ratios.min()), "limit_seconds": limit, "products": limit / median["mpiddl"],
        "accuracy": float(np.mean(accuracy["mpiddl"])), "baseline_accuracy": float(np.mean(accuracy["scikit-learn"])),
    }  # fmt: skip


def _rate(dtype: str) -> float:
    """Operations a second of the BLAS, the best of a few products."""
    x = np.random.default_rng(0).standard_normal((SQUARE, SQUARE)).astype(dtype)
    out, best = np.empty_like(x), np.inf
    for _ in range(SQUARE_TIMES):
        begin = now()
        np.dot(x, x, out=out)
        best = min(best, now() - begin)
    return 2.0 * SQUARE**3 / best
