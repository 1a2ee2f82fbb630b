"""One fit of scikit-learn's MLP on all ranks of a communicator, with scikit-learn's attributes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from sklearn.neural_network import _multilayer_perceptron as theirs

from mpiddl.memory import keep_freed
from mpiddl.neural_network import lbfgs, stochastic
from mpiddl.neural_network.network import ACTIVATIONS, Network, Rows
from mpiddl.neural_network.random import random_of_all
from mpiddl.neural_network.samples import Samples, read_samples
from mpiddl.node.cores import limited_threads
from mpiddl.transport.comm import Comm

SOLVERS = ("adam", "sgd", "lbfgs")
INNER = ("_validate_input", "_initialize", "_init_coef", "_predict", "_forward_pass_fast")
"""Methods of scikit-learn's class that a fit calls."""

BYPASSED = ("_backprop", "_fit_stochastic", "_fit_lbfgs", "_forward_pass", "_compute_loss_grad", "_loss_grad_lbfgs",
            "_update_no_improvement_count", "_score")
"""Methods that a fit does not call: a class that overrides one of them trains in a way of its own."""


def not_served(model: Any) -> str:
    """Why a fit of ``model`` has to be scikit-learn's own; empty if it need not."""
    if missing := [name for name in INNER if not hasattr(type(model), name)]:
        return f"this version of scikit-learn has no {missing[0]}"
    if model.solver not in SOLVERS or model.activation not in ACTIVATIONS:
        return f"solver {model.solver!r} with activation {model.activation!r}"
    if getattr(model, "loss", "log_loss") not in ("log_loss", "squared_error", "poisson"):
        return f"loss {model.loss!r}"
    kinds = theirs.MLPClassifier, theirs.MLPRegressor
    for name in BYPASSED:
        known = [getattr(kind, name, None) for kind in kinds]
        if getattr(type(model), name, None) not in known:
            return f"{type(model).__name__} has its own {name}"
    return ""


def fit(model: Any, comm: Comm, X: Any, y: Any, sample_weight: Any, incremental: bool, rows: str, threads: int) -> None:
    """Train ``model`` (scikit-learn's `fit`, or `partial_fit` if ``incremental``). Collective.

    Parameters
    ----------
    model : sklearn.neural_network.MLPClassifier or MLPRegressor
        Its parameters have been validated.
    comm : Comm
    X, y, sample_weight
        As scikit-learn takes them.
    rows : {"own", "all"}
        Whether each rank passes its own rows, or every rank all of them.
    threads : int
        Threads of this rank, 0 for its share of the cores.

    Raises
    ------
    ValueError
        scikit-learn's, on every rank.

    Communication
    -------------
    That of `read_samples`, then that of `stochastic` or `lbfgs`.
    """
    keep_freed()
    hidden = _hidden(model.hidden_layer_sizes)
    reset = not hasattr(model, "coefs_") or (not model.warm_start and not incremental)
    samples = read_samples(model, comm, X, y, sample_weight, incremental, reset, rows)
    model.n_outputs_ = samples.y.shape[1]
    sizes = [samples.x.shape[1], *hidden, model.n_outputs_]
    model._random_state = random_of_all(comm, model.random_state)
    if reset:
        model._initialize(samples.y, sizes, samples.x.dtype)
    _check_layers(model, sizes)
    with limited_threads(comm, threads, os.environ) as (count, _):
        _train(model, comm, samples, incremental, count)
    if not all(np.isfinite(array).all() for array in (*model.coefs_, *model.intercepts_)):
        raise ValueError("Solver produced non-finite parameter weights. The input data may contain large values and need to be "
                         "preprocessed.")


def _train(model: Any, comm: Comm, samples: Samples, incremental: bool, threads: int) -> None:
    by_epochs = model.solver != "lbfgs"
    most = stochastic.batch_rows(model, samples.n) if by_epochs else min(lbfgs.ROWS_AT_ONCE, samples.n)
    network = Network(model.coefs_, model.intercepts_, model.activation, model.out_activation_, most, threads)
    try:
        rows = _rows(samples, model.out_activation_ == "softmax", network.flat.dtype)
        if by_epochs:
            views = network.views(network.flat)
            model.coefs_, model.intercepts_ = views[: len(views) // 2], views[len(views) // 2 :]
            stochastic.train(model, comm, network, rows, samples, incremental)
        else:
            lbfgs.minimise(model, comm, network, rows, samples)
    finally:
        network.close()


def _hidden(sizes: Any) -> list[int]:
    """The hidden layers as a list."""
    listed = list(sizes) if hasattr(sizes, "__iter__") else [sizes]
    if np.any(np.array(listed) <= 0):
        raise ValueError(f"hidden_layer_sizes must be > 0, got {listed}.")
    return [int(size) for size in listed]


def _check_layers(model: Any, sizes: list[int]) -> None:
    """Refuse parameters of an earlier fit for other data, or with another number of layers; hidden ones keep their sizes."""
    there = [model.coefs_[0].shape[0], *(coef.shape[1] for coef in model.coefs_)]
    if (len(there), there[0], there[-1]) != (len(sizes), sizes[0], sizes[-1]):
        raise ValueError(f"warm_start: got layers of {sizes} units after a fit with {there}, expected the same; use "
                         "warm_start=False")


def _rows(samples: Samples, softmax: bool, dtype: np.dtype) -> Rows:
    """This rank's rows as the kernels take them."""
    held = samples.held
    targets = samples.y[held]
    targets = targets.argmax(axis=1).reshape(-1, 1) if softmax else targets
    weights = np.empty(0, dtype) if samples.weights is None else samples.weights[held].astype(dtype, copy=False)
    return Rows(samples.x.astype(dtype, copy=False), np.ascontiguousarray(targets, np.float64), weights)


