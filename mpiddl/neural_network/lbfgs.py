"""L-BFGS by SciPy on rank 0; all ranks compute the loss and the gradient of their samples.

Rank 0 alone chooses the next point, so ranks whose processors round differently cannot part. Cost of an evaluation: a broadcast
of the parameters and an all-reduce of the gradient and the loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy
import scipy.optimize
from sklearn.utils.optimize import _check_optimize_result

from mpiddl import kernels
from mpiddl.collectives import allreduce
from mpiddl.layout import block, pieces
from mpiddl.neural_network.network import Network, Rows
from mpiddl.neural_network.samples import Samples
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm

ROWS_AT_ONCE = 1024
"""Rows that go through all layers together: adding up their gradients then costs little beside the products."""

PRINTS = tuple(map(int, scipy.__version__.split(".")[:2])) < (1, 15)
"""Whether SciPy's L-BFGS-B has an option for what it prints. Later ones print nothing."""


def minimise(model: Any, comm: Comm, network: Network, rows: Rows, samples: Samples) -> None:
    """Train ``model`` in place. Its parameters become float64, as in scikit-learn."""
    objective = _Objective(model, comm, network, rows, samples)
    if comm.rank == 0:
        options = {"maxfun": model.max_fun, "maxiter": model.max_iter, "gtol": model.tol}
        if PRINTS:
            options["iprint"] = 1 if model.verbose else -1
        found = scipy.optimize.minimize(objective.lead, network.flat.copy(), method="L-BFGS-B", jac=True, options=options)
        comm.bcast(False)
    else:
        while comm.bcast(None):
            objective.evaluate()
        found = None
    if comm.size > 1:
        plain = None if found is None else {key: found[key] for key in ("x", "fun", "nit", "status", "message")}
        found = scipy.optimize.OptimizeResult(comm.bcast(plain))
    model.n_iter_ = _check_optimize_result("lbfgs", found, model.max_iter)
    model.loss_ = found.fun
    views = network.views(found.x)
    model.coefs_, model.intercepts_ = views[: len(views) // 2], views[len(views) // 2 :]


class _Objective:
    """The mean loss of all samples and its gradient."""

    def __init__(self, model: Any, comm: Comm, network: Network, rows: Rows, samples: Samples):
        self._comm, self._network, self._alpha = comm, network, model.alpha
        part = block(samples.n, comm.size, comm.rank)
        self._parts = [rows.part(piece.start, piece.stop) for piece in
                       pieces(rows.x.shape[0], ROWS_AT_ONCE)] if samples.first is not None else [
                           rows.part(part.start + piece.start, part.start + piece.stop) for piece in
                           pieces(len(part), ROWS_AT_ONCE)]
        self._weight = samples.n if samples.weights is None else float(samples.weights.sum())
        if not self._weight:
            raise ZeroDivisionError("Weights sum to zero, can't be normalized")
        self._total = np.zeros(network.flat.size + 1)

    def lead(self, flat: np.ndarray) -> tuple[float, np.ndarray]:
        """On rank 0: what SciPy asks for at a point."""
        if self._comm.size > 1:
            self._comm.bcast(True)
        self._network.flat[:] = flat
        return self.evaluate()

    def evaluate(self) -> tuple[float, np.ndarray]:
        """The loss and the gradient at rank 0's point, on every rank."""
        network, total = self._network, self._total
        if self._comm.size > 1:
            self._comm.Bcast(network.flat)
        total[:] = 0
        for rows in self._parts:
            total[-1] += network.gradient(rows)
            total[:-1] += network.grad
        if self._comm.size > 1:
            allreduce(self._comm, IN_PLACE, total)
        weights = network.flat[network.weights]
        gradient = total[:-1] / self._weight
        gradient[network.weights] += self._alpha / self._weight * weights
        return (total[-1] + 0.5 * self._alpha * kernels.sum_squares(weights)) / self._weight, gradient
