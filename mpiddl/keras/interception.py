"""What is replaced in Keras 3 while `mpiddl run` runs a program.

Replaced, because a callback sees neither batches nor gradients:

- ``keras.Model.fit`` and ``evaluate``, to divide the batches of ``train_step`` and ``test_step``: each rank iterates all
  batches, and computes its part of the rows;
- ``keras.optimizers.Optimizer.apply``, with JAX ``stateless_apply``, to sum gradients over ranks;
- ``keras.Model.get_metrics_result``, so that all ranks, and all callbacks, see the metrics of whole batches.

A rank's loss is a mean over its own rows. Its gradient, times its share of the rows, adds up to that of the whole batch; so do
penalties, which every rank has. After a step, the variables that are not trained, such as the averages of batch normalisation,
become the mean over ranks. A rank without rows computes the first row of the batch, and counts nothing of it.

Cost of a step: the strategy's, for the gradients, one all-reduce of the metrics' and the untrained variables, and one of 4
bytes before each of these.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any
from weakref import WeakSet

import numpy as np

from mpiddl.errors import MismatchError
from mpiddl.keras.backends import BACKENDS
from mpiddl.strategies.base import Strategy
from mpiddl.strategies.summed_arrays import SummedArrays
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm


class Interception:
    """Keras as a program sees it on the ranks of ``comm``.

    Parameters
    ----------
    keras : module
    comm : Comm
        For this alone.
    strategy : Strategy
        Resolved for these ranks.
    busy : callable, optional
        Gives a context in which nothing else divides batches or passes.
    """

    def __init__(self, keras: Any, comm: Comm, strategy: Strategy, busy: Callable[[], Any] = contextlib.nullcontext):
        self._keras, self._comm, self._strategy, self._busy = keras, comm, strategy, busy
        self._undo: list[Callable[[], None]] = []
        self._sums: dict[int, SummedArrays] = {}
        self._shared: WeakSet[Any] = WeakSet()
        self._step: _Step | None = None
        self._applying = False
        self.steps, self.over, self.why = dict[str, int](), False, ""
        name = keras.config.backend()
        if name not in BACKENDS:
            self.why = f"Keras runs on {name}; expected {' or '.join(BACKENDS)}"
        elif not strategy.sums_gradients:
            self.why = "the strategy exchanges models; expected one that sums gradients, such as auto"
        else:
            self._backend: Any = BACKENDS[name]()
            for method in ("fit", "evaluate"):
                self._replace(keras.Model, method, self._divided)
            self._replace(keras.Model, "get_metrics_result", self._metrics)
            for owner in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
                self._replace(owner, *(("stateless_apply", self._apply_stateless) if self._backend.stateless else
                                       ("apply", self._apply)))
            if name == "tensorflow":
                self._same_shuffles()

    def _same_shuffles(self) -> None:
        """Shuffling is random on each rank unless TensorFlow has a seed."""
        tensorflow: Any = importlib.import_module("tensorflow")

        tensorflow.random.set_seed(self._comm.bcast(int(np.random.SeedSequence().generate_state(1)[0])))

    def remove(self) -> None:
        """Put back everything."""
        while self._undo:
            self._undo.pop()()

    def rows(self) -> list[tuple[str, str]]:
        """Lines of the final table."""
        size = self._comm.size
        if self.why:
            return [("Keras", f"only replicated, not distributed: {self.why}")]
        return [(name, f"{count} steps of fit: each batch was divided over {size} ranks") for name, count in self.steps.items()]

    @property
    def used(self) -> bool:
        """Whether the program has trained or evaluated a model of Keras."""
        return bool(self._shared)

    def finish(self) -> None:
        """The program is over. Collective.

        Raises
        ------
        MismatchError
            Other ranks are in `fit` or `evaluate`. On all ranks.
        """
        if not self.why:
            self._backend.wait()
            self._meet(here=False)
        self.over = True
        for each in self._sums.values():
            each.Free()
        self._comm.Free()

    def _meet(self, here: bool = True) -> None:
        """Find out, before ranks exchange, whether the program is over on some of them. Collective."""
        there = np.array([here], np.int32)
        self._comm.Allreduce(IN_PLACE, there)
        if there[0] not in (0, self._comm.size):
            over = f"{self._comm.size - there[0]} of {self._comm.size} ranks"
            raise MismatchError(f"program: it is over on {over}, and the others train or evaluate a Keras model; expected that "
                                "all ranks leave together. Does it depend on the numbers of a rank, or on the time?")

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        before = getattr(owner, name)
        own = name in vars(owner)
        setattr(owner, name, functools.wraps(before)(make(before)))
        self._undo.append(lambda: setattr(owner, name, before) if own else delattr(owner, name))

    # fit and evaluate

    def _divided(self, before: Any) -> Any:
        def call(model: Any, *args: Any, **options: Any) -> Any:
            if not self.over and model not in self._shared:
                self._share(model)
            with self._busy():
                return before(model, *args, **options)

        return call

    def _share(self, model: Any) -> None:
        """Divide the batches of this model from now on, which starts with the values of rank 0. Collective."""
        self._backend.wait()
        self._meet()
        self._shared.add(model)
        for variable in model.variables if model.built else ():
            variable.assign(self._comm.bcast(np.asarray(self._keras.ops.convert_to_numpy(variable))))
        model.train_function = model.test_function = None  # compiled ones would call the steps of before
        for name in ("train_step", "test_step"):
            setattr(model, name, self._stepped(model, getattr(model, name), name == "train_step"))
            self._undo.append(functools.partial(_forget, model, name))

    def _stepped(self, model: Any, step: Any, trains: bool) -> Any:
        kind = type(model).__name__

        @functools.wraps(step)
        def call(*given: Any) -> Any:
            *state, data = given  # JAX passes the values of variables as well
            own, weight = self._own(data, self._least(model))
            if self.over or own is None:
                return step(*given)
            has_rows = isinstance(weight, float) and weight > 0  # in a graph it may be found out in the step alone
            self._step = _Step(weight, None if has_rows else _counted_before(model, *state), trains,
                               functools.partial(self._count, kind) if trains else None)
            try:
                found = step(*state, own)
                if state:
                    return found[0], self._settled(model, *found[1:])
                self._settle(model)
                return found
            finally:
                self._step = None

        return call

    def _count(self, kind: str) -> None:
        self.steps[kind] = self.steps.get(kind, 0) + 1

    def _least(self, model: Any) -> int:
        """Rows that a rank computes at least: batch normalisation needs two for a variance."""
        return 2 if any(isinstance(each, self._keras.layers.BatchNormalization) for each in _layers(model)) else 1

    def _own(self, data: Any, least: int) -> tuple[Any, Any]:
        """This rank's rows of a batch, and its weight; None if the batch has no common number of rows."""
        leaves = [leaf for leaf in self._keras.tree.flatten(data) if leaf is not None]
        samples = [self._backend.samples(leaf) for leaf in leaves]
        if not samples or any(each is None for each in samples):
            return None, None
        if isinstance(samples[0], int) and len(set(samples)) > 1:
            return None, None
        begin, end, weight = self._backend.part(samples[0], self._comm.size, self._comm.rank, least)
        return self._keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[begin:end], data), weight

    # Gradients

    def _apply(self, before: Any) -> Any:
        def apply(optimiser: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if self._applying or self.over or self._step is None:
                return before(optimiser, grads, trainable_variables)
            self._applying = True
            try:
                return before(optimiser, self._summed(id(optimiser), list(grads), self._step), trainable_variables)
            finally:
                self._applying = False

        return apply

    def _apply_stateless(self, before: Any) -> Any:
        def apply(optimiser: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            def whole(optimiser: Any, grads: Any, trainable_variables: Any) -> Any:
                return before(optimiser, optimizer_variables, grads, trainable_variables)

            return self._apply(whole)(optimiser, grads, trainable_variables)

        return apply

    def _summed(self, key: int, grads: list[Any], step: _Step) -> list[Any]:
        there = [grad for grad in grads if grad is not None]
        if key not in self._sums:
            self._sums[key] = SummedArrays(self._comm.Dup(), self._strategy)

        def total(arrays: Any) -> Any:
            self._meet()
            if step.count is not None:
                step.count()
            return [arrays[0], *self._sums[key](arrays[1:], float(arrays[0]))]

        found = iter(self._backend.call(total, [self._number(step.weight), *there])[1:])
        return [None if grad is None else next(found) for grad in grads]

    def _number(self, value: Any) -> Any:
        return self._keras.ops.convert_to_tensor(value, dtype=self._backend.wide)

    # Metrics, and variables that are not trained

    def _metrics(self, before: Any) -> Any:
        def get(model: Any) -> Any:
            if self.over or model not in self._shared:
                return before(model)
            variables = _counts(model)
            if not variables:
                return before(model)
            totals = self._backend.call(self._plain_sum, [self._counted(each) for each in variables])
            others = [each for metric in model.metrics for each in metric.variables if each.aggregation != "sum"]
            values = [*totals, *map(self._keras.ops.convert_to_tensor, others)]
            with self._keras.StatelessScope(state_mapping=list(zip([*variables, *others], values, strict=True))):
                return before(model)

        return get

    def _counted(self, variable: Any) -> Any:
        """What a variable of a metric has counted on this rank: without the step under way, if this rank has no rows in it."""
        value = self._keras.ops.convert_to_tensor(variable)
        if self._step is None or self._step.counts is None:
            return value
        old = self._step.counts.get(id(variable))
        return self._backend.where(self._step.weight == 0, self._keras.ops.zeros_like(value) if old is None else old, value)

    def _settle(self, model: Any) -> None:
        """After a step: metrics have counted this rank's rows only; untrained variables are the mean over ranks."""
        step = self._step
        assert step is not None
        for variable in () if step.counts is None else _counts(model):
            variable.assign(self._counted(variable))
        untrained = [each for each in model.non_trainable_variables if _is_real(each)] if step.trains else []
        for variable, mean in zip(untrained, self._means(untrained, step.weight), strict=True):
            variable.assign(mean)

    def _settled(self, model: Any, state: Any) -> Any:
        """`_settle` of the values that a step has returned: trained, untrained, of the optimiser if it trains, of metrics."""
        step = self._step
        assert step is not None
        trained, untrained, *rest, metrics = state
        if step.counts is not None:
            metrics = [step.counts.get(id(variable), value) for variable, value in
                       zip(model.metrics_variables, metrics, strict=True)]
        if step.trains:
            real = list(map(_is_real, model.non_trainable_variables))
            means = iter(self._means(list(compress(untrained, real)), step.weight))
            untrained = [next(means) if yes else value for yes, value in zip(real, untrained, strict=True)]
        return trained, untrained, *rest, metrics

    def _means(self, values: list[Any], weight: Any) -> list[Any]:
        """Over ranks, with their weights."""
        if not values:
            return []
        shares = [self._keras.ops.cast(each, self._backend.wide) * self._number(weight) for each in values]
        totals = self._backend.call(self._plain_sum, shares)
        return [self._keras.ops.cast(total, each.dtype) for total, each in zip(totals, values, strict=True)]

    def _plain_sum(self, arrays: Any) -> list[np.ndarray]:
        self._meet()
        flat = np.concatenate([np.asarray(each, np.float64).ravel() for each in arrays])
        self._comm.Allreduce(IN_PLACE, flat)
        ends = np.cumsum([np.size(each) for each in arrays])
        return [flat[end - np.size(each) : end].reshape(np.shape(each)).astype(each.dtype)
                for end, each in zip(ends, arrays, strict=True)]


@dataclass
class _Step:
    """A step under way.

    weight : of this rank's rows in the mean.
    counts : what the metrics had counted before, by identity of the variable; None if this rank has rows.
    trains : whether it is one of `fit`.
    count : to be called in each step of `fit`.
    """

    weight: Any
    counts: dict[int, Any] | None
    trains: bool
    count: Callable[[], None] | None


def _counts(model: Any) -> list[Any]:
    """The variables of a model's metrics that are sums over samples."""
    return [variable for metric in model.metrics for variable in metric.variables if variable.aggregation == "sum"]


def _counted_before(model: Any, state: Any = None) -> dict[int, Any]:
    """What the variables of `_counts` hold, by identity; with JAX according to the ``state`` that a step gets."""
    if state is None:
        return {id(each): each + 0 for each in _counts(model)}
    held = dict(zip(map(id, model.metrics_variables), state[-1], strict=True))
    return {id(each): held[id(each)] for each in _counts(model)}


def _is_real(variable: Any) -> bool:
    return "float" in str(variable.dtype)


def _layers(model: Any) -> Iterator[Any]:
    """All layers in a model, and the model."""
    yield model
    for layer in getattr(model, "layers", ()):
        yield from _layers(layer)


def _forget(model: Any, name: str) -> None:
    if name in vars(model):
        delattr(model, name)
