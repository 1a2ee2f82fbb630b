"""What is replaced in Keras 3 while `mpiddl run` runs a program.

Replaced, because a callback sees neither batches nor gradients:

- ``keras.Model.fit`` and ``evaluate``, to divide the batches of ``train_step`` and ``test_step``: each rank iterates all
  batches, and computes its part of the rows;
- ``keras.optimizers.Optimizer.apply``, with JAX ``stateless_apply``, to sum gradients over ranks;
- ``keras.Model.get_metrics_result``, so that all ranks, and all callbacks, see the metrics of whole batches.

A rank's loss is a mean over its own rows. Its gradient, times its share of the rows, adds up to that of the whole batch; so do
penalties, which every rank has. After a step, the variables that are never trained, such as the averages of batch
normalisation, become the mean over ranks. A rank without rows computes the first row of the batch, and counts nothing of it.

A batch that cannot be divided is computed whole on every rank: gradients are the mean over ranks, and rank 0 counts metrics.

Cost of a step: the strategy's, for the gradients, one all-reduce of the metrics' and the untrained variables, and one of 16
bytes before each of these.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any
from weakref import WeakSet, ref

import numpy as np

from mpiddl.keras.backends import BACKENDS
from mpiddl.strategies.base import Strategy
from mpiddl.strategies.summed_arrays import SummedArrays
from mpiddl.transport.agree import check_same_place
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm

SUMS_KEPT = 4
"""Sums of gradients, of so many different lists of shapes, that keep their buffers and their communicator."""


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
        self._sums: OrderedDict[Any, SummedArrays] = OrderedDict()
        self._shared: WeakSet[Any] = WeakSet()
        self._step: _Step | None = None
        self._applying = False
        self.steps, self.over, self.why = dict[tuple[str, str], int](), False, ""
        self._without_xla: set[str] = set()
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
        found = []
        for (name, whole), count in self.steps.items():
            how = "every rank computed the whole batch, because " + whole
            found.append((name, f"{count} steps of fit: {how if whole else f'each batch was divided over {size} ranks'}"))
        return found + [(name, "ran without XLA (jit_compile=False), which cannot call mpiddl") for name in self._without_xla]

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
            check_same_place(self._comm, "the end of the program")
        self.over = True
        for each in self._sums.values():
            each.Free()
        self._comm.Free()

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
            if not self.over and self._backend.without_xla and getattr(model, "jit_compile", False):
                model.jit_compile = False
                self._without_xla.add(type(model).__name__)
            with self._busy():
                return before(model, *args, **options)

        return call

    def _share(self, model: Any) -> None:
        """Divide the batches of this model from now on, which starts with the values of rank 0. Collective."""
        self._backend.wait()
        check_same_place(self._comm, f"the first fit or evaluate of a Keras model, {type(model).__name__}")
        self._shared.add(model)
        for variable in model.variables if model.built else ():
            variable.assign(self._comm.bcast(np.asarray(self._keras.ops.convert_to_numpy(variable))))
        model.train_function = model.test_function = None  # compiled ones would call the steps of before
        for name in ("train_step", "test_step"):
            setattr(model, name, self._stepped(model, getattr(model, name), name == "train_step"))
            self._undo.append(functools.partial(_forget, ref(model), name))

    def _stepped(self, model: Any, step: Any, trains: bool) -> Any:
        kind = type(model).__name__

        @functools.wraps(step)
        def call(*given: Any) -> Any:
            *state, data = given  # JAX passes the values of variables as well
            if self.over:
                return step(*given)
            own, weight, whole = self._own(model, data)
            counts = self._comm.rank == 0 if whole else weight > 0
            before = None if counts is True else _counted_before(model, *state)  # in a graph it is found out in the step alone
            self._step = _Step(weight, counts, before, trains, functools.partial(self._count, kind, whole) if trains else None)
            try:
                found = step(*state, own)
                if state:
                    return self._alike(found[0]), self._settled(model, *found[1:])
                self._settle(model)
                return self._alike(found)
            finally:
                self._step = None

        return call

    def _count(self, kind: str, whole: str) -> None:
        self.steps[kind, whole] = self.steps.get((kind, whole), 0) + 1

    def _least(self, model: Any) -> int:
        """Rows that a rank computes at least: batch normalisation needs two for a variance."""
        return 2 if any(isinstance(each, self._keras.layers.BatchNormalization) for each in _layers(model)) else 1

    def _own(self, model: Any, data: Any) -> tuple[Any, Any, str]:
        """This rank's rows of a batch, and its weight; the whole batch, and the reason, if it is not divided."""
        flatten = self._keras.tree.flatten
        samples = [self._backend.samples(leaf) for leaf in flatten(data) if leaf is not None]
        reductions = {getattr(loss, "reduction", "mean") for loss in flatten(getattr(model, "loss", None))}
        whole = ""
        if not samples or any(each is None for each in samples) or len({each for each in samples if isinstance(each, int)}) > 1:
            whole = "its arrays have no common number of rows"
        elif reductions - {"sum_over_batch_size", "mean"}:
            whole = "its loss is no plain mean over the batch"
        if whole:
            return data, 1 / self._comm.size, whole
        begin, end, weight = self._backend.part(samples[0], self._comm.size, self._comm.rank, self._least(model))
        own = self._keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[begin:end], data)
        return own, weight, ""

    # Gradients

    def _apply(self, before: Any) -> Any:
        def apply(optimiser: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if self._applying or self.over or self._step is None:
                return before(optimiser, grads, trainable_variables)
            self._applying = True
            try:
                return before(optimiser, self._summed(list(grads), self._step), trainable_variables)
            finally:
                self._applying = False

        return apply

    def _apply_stateless(self, before: Any) -> Any:
        def apply(optimiser: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            def whole(optimiser: Any, grads: Any, trainable_variables: Any) -> Any:
                return before(optimiser, optimizer_variables, grads, trainable_variables)

            return self._apply(whole)(optimiser, grads, trainable_variables)

        return apply

    def _summed(self, grads: list[Any], step: _Step) -> list[Any]:
        there = [grad for grad in grads if grad is not None]

        def total(arrays: Any) -> Any:
            weight, *rest = arrays
            check_same_place(self._comm, f"gradients of {sum(each.size for each in rest)} numbers of a Keras model")
            if step.count is not None:
                step.count()
            return [weight, *self._sum_for(rest)(rest, float(weight))]

        found = iter(self._backend.call(total, [self._number(step.weight), *there])[1:])
        return [None if grad is None else next(found) for grad in grads]

    def _sum_for(self, arrays: Sequence[np.ndarray]) -> SummedArrays:
        """The sum for arrays of these shapes. Collective if it is new; the one that was used longest ago is then freed."""
        key = tuple((each.shape, each.dtype.str) for each in arrays)
        if key not in self._sums:
            if len(self._sums) == SUMS_KEPT:
                self._sums.popitem(last=False)[1].Free()
            self._sums[key] = SummedArrays(self._comm.Dup(), self._strategy)
        self._sums.move_to_end(key)
        return self._sums[key]

    def _number(self, value: Any) -> Any:
        return self._keras.ops.convert_to_tensor(value, dtype=self._backend.wide)

    # Metrics, and variables that are not trained

    def _metrics(self, before: Any) -> Any:
        def get(model: Any) -> Any:
            if self._step is not None:
                self._step.asked = True
            if self.over or model not in self._shared:
                return before(model)
            variables = _counts(model)
            if not variables:
                return before(model)
            totals = self._backend.call(self._metric_sum, [self._counted(each) for each in variables])
            others = [each for metric in model.metrics for each in metric.variables if each.aggregation != "sum"]
            values = [*totals, *map(self._keras.ops.convert_to_tensor, others)]
            with self._keras.StatelessScope(state_mapping=list(zip([*variables, *others], values, strict=True))):
                return self._keras.tree.map_structure(self._plain, before(model))

        return get

    def _plain(self, value: Any) -> Any:
        """The tensor of a variable, which would lose the value that it has for a while."""
        return self._keras.ops.convert_to_tensor(value) if isinstance(value, self._keras.Variable) else value

    def _alike(self, logs: Any) -> Any:
        """What a step returns: numbers that do not come from `get_metrics_result` become the mean over ranks."""
        step = self._step
        assert step is not None
        if step.asked or not isinstance(logs, dict):
            return logs
        values = {name: self._keras.ops.convert_to_tensor(value) for name, value in logs.items()
                  if isinstance(value, float) or hasattr(value, "shape")}
        values = {name: value for name, value in values.items() if len(value.shape) == 0 and _is_real(value)}
        return {**logs, **dict(zip(values, self._means(list(values.values()), step.weight), strict=True))}

    def _counted(self, variable: Any) -> Any:
        """What a variable of a metric has counted on this rank: without the step under way, if that does not count here."""
        value = self._keras.ops.convert_to_tensor(variable)
        if self._step is None or self._step.before is None:
            return value
        old = self._step.before.get(id(variable))
        return self._backend.where(self._step.counts, value, self._keras.ops.zeros_like(value) if old is None else old)

    def _settle(self, model: Any) -> None:
        """After a step: metrics have counted this rank's rows only; untrained variables are the mean over ranks."""
        step = self._step
        assert step is not None
        for variable in () if step.before is None else _counts(model):
            variable.assign(self._counted(variable))
        untrained = list(compress(model.non_trainable_variables, _never_trained(model))) if step.trains else []
        for variable, mean in zip(untrained, self._means(untrained, step.weight), strict=True):
            variable.assign(mean)

    def _settled(self, model: Any, state: Any) -> Any:
        """`_settle` of the values that a step has returned: trained, untrained, of the optimiser if it trains, of metrics."""
        step = self._step
        assert step is not None
        trained, untrained, *rest, metrics = state
        if step.before is not None:
            metrics = [step.before.get(id(variable), value) for variable, value in
                       zip(model.metrics_variables, metrics, strict=True)]
        if step.trains:
            never = _never_trained(model)
            means = iter(self._means(list(compress(untrained, never)), step.weight))
            untrained = [next(means) if yes else value for yes, value in zip(never, untrained, strict=True)]
        return trained, untrained, *rest, metrics

    def _means(self, values: list[Any], weight: Any) -> list[Any]:
        """Over ranks, with their weights."""
        if not values:
            return []
        shares = [self._keras.ops.cast(each, self._backend.wide) * self._number(weight) for each in values]
        totals = self._backend.call(functools.partial(self._plain_sum, "averages"), shares)
        return [self._keras.ops.cast(total, each.dtype) for total, each in zip(totals, values, strict=True)]

    def _metric_sum(self, arrays: Any) -> list[np.ndarray]:
        return self._plain_sum("metrics", arrays)

    def _plain_sum(self, what: str, arrays: Any) -> list[np.ndarray]:
        flat = np.concatenate([np.asarray(each, np.float64).ravel() for each in arrays])
        check_same_place(self._comm, f"{what} of {flat.size} numbers of a Keras model")
        self._comm.Allreduce(IN_PLACE, flat)
        ends = np.cumsum([np.size(each) for each in arrays])
        return [flat[end - np.size(each) : end].reshape(np.shape(each)).astype(each.dtype)
                for end, each in zip(ends, arrays, strict=True)]


@dataclass
class _Step:
    """A step under way.

    weight : of this rank's rows in the mean.
    counts : whether metrics count on this rank; a tensor if the graph finds that out.
    before : what the metrics had counted before, by identity of the variable; None if they surely count on this rank.
    trains : whether it is one of `fit`.
    count : to be called in each step of `fit`.
    asked : whether it has called `get_metrics_result`.
    """

    weight: Any
    counts: Any
    before: dict[int, Any] | None
    trains: bool
    count: Callable[[], None] | None
    asked: bool = False


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


def _never_trained(model: Any) -> list[bool]:
    """Which of the variables that are not trained never are, such as running averages: not those of frozen layers."""
    layers = list(_layers(model))
    variables = model.non_trainable_variables
    if not all(hasattr(layer, "_non_trainable_variables") for layer in layers):
        return list(map(_is_real, variables))
    never = {id(each) for layer in layers for each in layer._non_trainable_variables}
    return [id(each) in never and _is_real(each) for each in variables]


def _layers(model: Any) -> Iterator[Any]:
    """All layers in a model, and the model."""
    if hasattr(model, "_flatten_layers"):
        yield from model._flatten_layers()
        return
    yield model
    for layer in getattr(model, "layers", ()):
        yield from _layers(layer)


def _forget(held: ref[Any], name: str) -> None:
    model = held()
    if model is not None and name in vars(model):
        delattr(model, name)
