"""Epochs of sgd or adam in the order of scikit-learn, each batch divided over the ranks.

One step: every rank computes the gradient of its samples of the batch, one all-reduce adds them up, and every rank makes the
same update. The steps are those of one rank, to rounding, whatever the number of ranks. Ranks without a
sample in a batch add zero.

Cost of a step: one all-reduce of the gradient. Cost of an epoch: one all-gather of a number, and with early stopping one of the
predictions for the samples set aside.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.base import is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import train_test_split
from sklearn.neural_network import _multilayer_perceptron
from sklearn.neural_network._stochastic_optimizers import AdamOptimizer, SGDOptimizer
from sklearn.utils import gen_batches, shuffle

from mpiddl import kernels
from mpiddl.collectives import allreduce
from mpiddl.neural_network.network import NO_INDEX, Network, Rows
from mpiddl.neural_network.samples import Samples
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm


def train(model: Any, comm: Comm, network: Network, rows: Rows, samples: Samples, incremental: bool) -> None:
    """Train ``model`` in place: one epoch if ``incremental``, else until it stops.

    Raises
    ------
    ValueError
        On every rank: early stopping in `partial_fit`, or a validation set of less than two samples.
    ZeroDivisionError
        On every rank: the weights of a batch sum to zero.
    """
    moments = _adopt_optimiser(model, network, incremental)
    if model.early_stopping and incremental:
        raise ValueError("partial_fit does not support early_stopping=True")
    chosen, validation = _set_aside(model, comm, rows, samples) if model.early_stopping else (np.arange(samples.n), None)
    batch_size = batch_rows(model, len(chosen), aloud=True)
    epochs = _Epochs(model, comm, network, rows, samples, chosen, batch_size, moments)
    try:
        model.n_iter_ = 0
        for _ in range(model.max_iter):
            _close_epoch(model, comm, epochs.run(), len(chosen), validation)
            if _is_over(model, comm) or incremental:
                break
            if model.n_iter_ == model.max_iter:
                _warn(f"Stochastic Optimizer: Maximum iterations ({model.max_iter}) reached and the optimization hasn't "
                      "converged yet.", ConvergenceWarning)
    except KeyboardInterrupt:
        if comm.size > 1:  # the other ranks have not been interrupted at the same step
            raise
        _warn("Training interrupted by user.")
    if model.early_stopping:
        model.coefs_, model.intercepts_ = model._best_coefs, model._best_intercepts


def batch_rows(model: Any, n: int, aloud: bool = False) -> int:
    """Samples of a batch, of ``n`` to be trained on."""
    if model.batch_size == "auto":
        return min(200, n)
    if model.batch_size > n and aloud:
        _warn("Got `batch_size` less than 1 or larger than sample size. It is going to be clipped")
    return int(np.clip(model.batch_size, 1, n))


def _warn(message: str, category: type[Warning] = UserWarning) -> None:
    """As scikit-learn's module does: programs have filters for its name."""
    warnings.warn_explicit(message, category, _multilayer_perceptron.__file__, 0, _multilayer_perceptron.__name__,
                           vars(_multilayer_perceptron).setdefault("__warningregistry__", {}))


class _Epochs:
    """Runs epochs; remembers the order of the samples, which each epoch shuffles anew."""

    def __init__(self, model: Any, comm: Comm, network: Network, rows: Rows, samples: Samples, chosen: np.ndarray,
                 batch_size: int, moments: list[np.ndarray]):
        self._model, self._comm, self._network, self._rows, self._samples = model, comm, network, rows, samples
        self._chosen, self._batch_size = chosen, batch_size
        self._order = np.arange(len(chosen))
        self._update = _updates(model, network, moments)
        self._in_place = not model.shuffle and comm.size == 1 and len(chosen) == samples.n

    def run(self) -> float:
        """One epoch; returns the sum of its batches' losses, each times its number of samples."""
        model, network, comm = self._model, self._network, self._comm
        if model.shuffle:
            self._order = shuffle(self._order, random_state=model._random_state)
        mine = penalties = 0.0
        for rows, index, count, weight in self._batches():
            loss = network.gradient(rows, index) if index is not None else _zero(network)
            if comm.size > 1:
                allreduce(comm, IN_PLACE, network.grad)
            mine += loss * (count / weight)
            if model.alpha:
                penalties += 0.5 * model.alpha * kernels.sum_squares(network.flat[network.weights]) / weight * count
            self._update(1 / weight, model.alpha / weight)
        return sum(comm.allgather(mine)) + penalties if comm.size > 1 else mine + penalties

    def _batches(self) -> Iterator[tuple[Rows, np.ndarray | None, int, float]]:
        """This rank's part of each batch (None: nothing), and number and weight of all samples of the batch."""
        samples, comm = self._samples, self._comm
        start = samples.held.start
        for batch in gen_batches(len(self._order), self._batch_size):
            count = batch.stop - batch.start
            if self._in_place:
                rows, index, numbers = self._rows.part(batch.start, batch.stop), NO_INDEX, batch
            else:
                rows, numbers = self._rows, self._chosen[self._order[batch]]
                index = numbers if comm.size == 1 else numbers[samples.share(comm, numbers)] - start
            weight = count if samples.weights is None else float(samples.weights[numbers].sum())
            if not weight:
                raise ZeroDivisionError("Weights sum to zero, can't be normalized")
            yield rows, index if self._in_place or len(index) else None, count, weight


def _zero(network: Network) -> float:
    network.grad[:] = 0
    return 0.0


def _adopt_optimiser(model: Any, network: Network, incremental: bool) -> list[np.ndarray]:
    """Give the model scikit-learn's optimiser, with moments that are views of flat arrays; returns these."""
    kind = AdamOptimizer if model.solver == "adam" else SGDOptimizer
    if not incremental or not isinstance(getattr(model, "_optimizer", None), kind):
        settings = ((model.beta_1, model.beta_2, model.epsilon) if model.solver == "adam" else
                    (model.learning_rate, model.momentum, model.nesterovs_momentum, model.power_t))
        model._optimizer = kind(network.views(network.flat), model.learning_rate_init, *settings)
    optimiser = model._optimizer
    moments = []
    for name in ("ms", "vs") if model.solver == "adam" else ("velocities",):
        moments.append(network.gathered(getattr(optimiser, name)))
        setattr(optimiser, name, network.views(moments[-1]))
    return moments


def _updates(model: Any, network: Network, moments: list[np.ndarray]) -> Any:
    """The update of all parameters, as a function of the gradient's scale and of the weights' decay."""
    optimiser, real = model._optimizer, network.flat.dtype.type
    parts = network.weights, slice(network.weights.stop, None)

    def adam(scale: float, decay: float) -> None:
        optimiser.t += 1
        beta1, beta2 = optimiser.beta_1, optimiser.beta_2
        optimiser.learning_rate = optimiser.learning_rate_init * np.sqrt(1 - beta2**optimiser.t) / (1 - beta1**optimiser.t)
        rest = map(real, (1, beta1, 1 - beta1, beta2, 1 - beta2, 1, optimiser.epsilon))
        shared = tuple(rest)
        for part, own in zip(parts, (decay, 0.0), strict=True):
            kernels.adam(network.flat[part], network.grad[part], mean[part], square[part], real(optimiser.learning_rate),
                         real(scale), real(own), *shared)

    def sgd(scale: float, decay: float) -> None:
        for part, own in zip(parts, (decay, 0.0), strict=True):
            kernels.rate_in_velocity(network.flat[part], network.grad[part], velocity[part], real(optimiser.learning_rate),
                                     real(scale), real(own), real(optimiser.momentum), bool(optimiser.nesterov))

    if model.solver == "adam":
        mean, square = moments
        return adam
    (velocity,) = moments
    return sgd


def _set_aside(model: Any, comm: Comm, rows: Rows, samples: Samples) -> tuple[np.ndarray, Any]:
    """Numbers of the samples to train on, and a function that scores the others."""
    stratify = samples.y if is_classifier(model) and model.n_outputs_ == 1 else None
    chosen, held_out = train_test_split(np.arange(samples.n), random_state=model._random_state, stratify=stratify,
                                        test_size=model.validation_fraction)
    if len(held_out) < 2:
        raise ValueError("The validation set is too small. Increase 'validation_fraction' or the size of your dataset.")
    y = samples.y[held_out]
    score = r2_score
    if is_classifier(model):
        y, score = model._label_binarizer.inverse_transform(y), accuracy_score
    weights = None if samples.weights is None else samples.weights[held_out]
    share = samples.share(comm, held_out)
    x = rows.x[held_out[share] - samples.held.start]

    def validation() -> float:
        found, places = model._predict(x, check_input=False), share
        if comm.size > 1:
            pairs = [pair for pair in comm.allgather((found, share)) if len(pair[1])]
            found, places = (np.concatenate(each) for each in zip(*pairs, strict=True))
        found = found[np.argsort(places)]
        if np.issubdtype(found.dtype, np.floating) and not np.isfinite(found).all():
            return np.nan
        return score(y, found, sample_weight=weights)

    return chosen, validation


def _close_epoch(model: Any, comm: Comm, loss: float, n: int, validation: Any) -> None:
    """Attributes after an epoch, and how many epochs in a row have brought no improvement."""
    model.n_iter_ += 1
    model.loss_ = loss / n
    model.t_ += n
    model.loss_curve_.append(model.loss_)
    aloud = model.verbose and comm.rank == 0
    if aloud:
        print(f"Iteration {model.n_iter_}, loss = {model.loss_:.8f}")
    if validation is None:
        worse = model.loss_ > model.best_loss_ - model.tol
        model.best_loss_ = min(model.loss_, model.best_loss_)
    else:
        found = validation()
        model.validation_scores_.append(found)
        if aloud:
            print(f"Validation score: {found:f}")
        worse = found < model.best_validation_score_ + model.tol
        if found > model.best_validation_score_:
            model.best_validation_score_ = found
            model._best_coefs = [coef.copy() for coef in model.coefs_]
            model._best_intercepts = [intercept.copy() for intercept in model.intercepts_]
    model._no_improvement_count = model._no_improvement_count + 1 if worse else 0
    model._optimizer.iteration_ends(model.t_)


def _is_over(model: Any, comm: Comm) -> bool:
    """Whether training stops; an adaptive learning rate is lowered first."""
    if model._no_improvement_count <= model.n_iter_no_change:
        return False
    what = "Validation score" if model.early_stopping else "Training loss"
    words = f"{what} did not improve more than tol={model.tol:f} for {model.n_iter_no_change} consecutive epochs."
    if model._optimizer.trigger_stopping(words, model.verbose and comm.rank == 0):
        return True
    model._no_improvement_count = 0
    return False
