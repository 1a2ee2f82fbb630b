"""The strategy interface: what ranks exchange during training, and when.

A strategy overrides some of these methods of `Strategy`. Each default changes nothing. "Talks": the method may communicate.

===========  =================================================  =====  ==================================================
method       called                                             talks  result
===========  =================================================  =====  ==================================================
check        once, before the data is read                      no     raises an error if the number of ranks does not fit
resolve      once, after `check`                                yes    the strategy to run on these ranks, and a sentence
calibrate    once, after `resolve`                              yes    the same, by measurements of the model
shards       once, before the data is read                      no     the number of data shards that suits it
placement    once, before the data is read                      no     the data shards of a rank
blocks       once, before the first step                        no     shards whose gradients it wants one by one
memory       once, before the first step                        yes    an array for the gradient, or None
warm         once, before the first step                        no     compiles kernels
note         once, before the first step                        yes    a sentence for the user
init         once, before the first step of a new run           yes    the state
needs_       in each step, before the gradient, or each of its  yes    whether this rank has to compute it
gradient     `blocks`, is computed
overlaps     once, before the first step                        yes    whether `start` sends parts of the gradient
start        in each step, when a part of the gradient is       yes    the state
             final, during the backward pass
combine_     in each step, after the backward pass of each      yes    the state
block        of its `blocks`
combine      in each step, after the backward pass              yes    `Combined`: the gradient for the update, the state
mix          in each step, after the update                     yes    the state; changes the parameters in place
model        at validations and checkpoints                     yes    the one model of all ranks
moments      at checkpoints, and after `finish`                 yes    the moments that belong to it
finish       once, after the last step                          yes    leaves the final model in the parameters
figures      once, after `finish`                               no     entries for the summary
===========  =================================================  =====  ==================================================

The state is a value, passed in and returned: dicts, lists, numbers, arrays and `Pending` results (operations in flight).
Checkpoints save and restore all of it; a strategy needs no code for that.

The loop (`mpiddl.training.loop`) calls, for each step::

    if needs_gradient(comm, state, replica, step):
        score = model.gradient(...)          which calls  state = start(comm, state, grad, part, step)  for each part
    combined = combine(comm, state, grad, replica, step)
    if combined.count: the optimiser's update with combined.grad / combined.count
    state = mix(comm, combined.state, replica, step)

A serving rank, which makes updates but has no data, uses the same functions. Its `placement` gives the number of workers that
it ``serves``, its `combine` receives a gradient, and its `mix` sends the parameters. `Combined.stop` ends the loop of this rank
alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.layout import rank_shards
from mpiddl.memory import PRIVATE
from mpiddl.transport.base import Request
from mpiddl.transport.comm import Comm


class Placement(NamedTuple):
    """The role of a rank.

    shards : data shards that the rank trains on, each from 0 to the number of shards - 1.
    serves : number of workers that the rank serves; 0 for a rank that trains. A serving rank loops until `combine` returns
        ``stop``. For the learning-rate schedule, ``serves`` applied updates count as one step.
    endless : a training rank also loops until `combine` returns ``stop``.
    scores : those of its shards whose validation rows it scores, if other ranks hold the same shards; None: all.
    """

    shards: Sequence[int]
    serves: int = 0
    endless: bool = False
    scores: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The current step. A sum of gradients divided by the number of its samples is the mean.

    index : number of steps that this rank has finished.
    count : samples in this rank's own gradient.
    total : samples in the global batch, over all ranks.
    rate : learning rate of this step.
    steps : number of steps of the whole run.
    meet : steps between two meetings of all ranks, for validation and checkpoints; 0: no meetings.
    full : samples in a global batch other than the last one of an epoch; 0: ``total``.
    """

    index: int
    count: int
    total: int
    rate: float
    steps: int = 0
    meet: int = 0
    full: int = 0


def _nobody(*args: Any) -> Any:
    raise UsageError("replica.apply, replica.rate: this replica has no optimiser, expected a replica of a training loop")


class Replica:
    """The flat parameters and the optimiser's flat moments of a rank. Change them in place.

    ``replica.params += x`` and ``replica.params[:] = x`` change the parameters; ``replica.params = x`` raises an error.

    Attributes
    ----------
    params : ndarray, shape (n,)
    moments : dict of str to ndarray, shape (n,)
    apply : callable
        ``apply(params, grad, moments, rate, scale, step)`` makes one update with the run's optimiser on arrays of this form. It
        clips the gradient if the run asks for it.
    rate : callable
        ``rate(steps)`` is the learning rate after that many steps of the run.
    begun : int
        Steps that a resumed run had done before.
    updates : int
        Updates that the moments have seen.
    tensors : sequence of slice
        The part of the parameters that each array of the model occupies.
    layers : sequence of slice
        The part of each layer: an array, and the arrays after it of one dimension that fits, such as a bias.
    trainers : int
        Ranks that hold rows, the first ones; 0: all ranks. The others, idle ranks, must not count in averages.
    proportional : bool
        Updates are proportional to the gradients, as those of SGD are. False: adaptive, such as Adam.
    """

    __slots__ = ("_params", "apply", "begun", "layers", "moments", "proportional", "rate", "tensors", "trainers", "updates")

    def __init__(self, params: np.ndarray, moments: dict[str, np.ndarray], apply: Callable[..., None] = _nobody,
                 rate: Callable[[float], float] = _nobody, begun: int = 0, updates: int = 0, tensors: Sequence[slice] = (),
                 layers: Sequence[slice] = (), trainers: int = 0, proportional: bool = True):
        self._params, self.moments, self.apply, self.rate = params, moments, apply, rate
        self.begun, self.updates, self.trainers, self.proportional = begun, updates, trainers, proportional
        self.tensors = tensors or [slice(0, params.size)]
        self.layers = layers or [slice(0, params.size)]

    @property
    def params(self) -> np.ndarray:
        return self._params

    @params.setter
    def params(self, value: np.ndarray) -> None:
        if value is not self._params:
            raise AttributeError("replica.params: got another array, expected a change of the values in place: "
                                 "replica.params[:] = ...")


@dataclass(frozen=True, slots=True)
class Combined:
    """The result of `combine`.

    grad : sum of per-sample gradients for the local update, shape (n,). It may be read-only memory shared by several ranks.
    count : number of samples in the sum; 0: no local update in this step.
    state : the strategy's new state.
    stop : this rank has finished its last step. `finish` is still called, `mix` is not.
    updates : number of updates that the strategy has made itself.
    meet : all ranks are at a meeting: they may communicate between steps although they do not step together.
    rate : factor for the learning rate of the local update.
    """

    grad: np.ndarray
    count: int
    state: Any
    stop: bool = False
    updates: int = 0
    meet: bool = False
    rate: float = 1.0


class Pending:
    """An array that an operation in flight is still writing. `wait` returns it when it is complete.

    A checkpoint completes every `Pending` in a state and saves the array. A restored `Pending` is complete.
    """

    def __init__(self, array: np.ndarray, request: Request | None = None):
        self._array, self._request = array, request

    def wait(self) -> np.ndarray:
        if self._request is not None:
            self._request.Wait()
            self._request = None
        return self._array


class Strategy:
    """Base class of all strategies. Every function has a default that changes nothing.

    The description of the module says when each function is called.

    replicated : after `mix`, the moments and the parameters (or the result of `model`) are the same bits on every rank. Each
        checkpoint verifies this.
    guesses : between steps the parameters are provisional; no other strategy may change them.
    lockstep : all ranks take their steps together. The loop may then communicate between steps (validation, checkpoints, time
        limits).
    sums_gradients : every step applies the sum of all ranks' gradients, and nothing else is exchanged. All strategies with this
        attribute take the same steps, to rounding. Not inherited.
    sums : `combine` sums the gradients of several ranks, in some steps at least.
    by_shard : the gradient of a rank is the sum, in a binary tree, of one gradient for each of its shards.
    even : ranks are meant to hold as many shards as each other; the user is warned if they do not.
    optimisers : names of the optimisers that the strategy works with; empty: all.
    """

    replicated: bool = True
    guesses: bool = False
    lockstep: bool = True
    sums_gradients: bool = False
    sums: bool = False
    by_shard: bool = False
    even: bool = True
    optimisers: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        if vars(cls).get("sums_gradients") and "sums" not in vars(cls):
            cls.sums = True

    def __repr__(self) -> str:
        """The class, and those of its attributes that are numbers, words or None."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, (bool, int, float, str, type(None)))}
        told = ", ".join(f"{name}={value!r}" for name, value in plain.items() if not name.startswith("_"))
        return f"{type(self).__qualname__}({told})"

    @property
    def undecided(self) -> str:
        """What `calibrate` is going to decide by measurements, such as "redundancy", for a dry run; "" if nothing."""
        return ""

    def resolve(self, comm: Comm) -> tuple[Strategy, str]:
        """Return the strategy to run on these ranks, by default this one, and a sentence for the user or "".

        The result is the same on every rank. Called once, after `check` and before all other functions. Collective.
        """
        return self, ""

    def calibrate(self, comm: Comm, trial: Any) -> tuple[Strategy, str]:
        """Return the strategy to run, as `resolve`, by measurements. ``trial``: a `mpiddl.training.trial.Trial`. Collective."""
        return self, ""

    def check(self, size: int) -> None:
        """Raise a `UsageError` if the strategy cannot run on ``size`` ranks."""

    def placement(self, shards: int, rank: int, size: int) -> Placement:
        """Return the role of ``rank``. The default is a contiguous range of the ``shards`` virtual shards."""
        return Placement(rank_shards(shards, size, rank))

    def shards(self, size: int) -> int:
        """Return the number of data shards that suits this strategy on ``size`` ranks, unless users ask for another; 0: any."""
        return 0

    def blocks(self, shards: int, rank: int, size: int) -> Sequence[Sequence[int]] | None:
        """Return sets of this rank's shards whose gradients are computed one by one (`combine_block`); None: all in one."""
        return None

    def memory(self, comm: Comm, size: int, dtype: np.dtype) -> np.ndarray | None:
        """Return an array for the gradient, shape ``(size,)`` and ``dtype``, or None for memory of the rank's own.

        Called on every rank, before the first step.
        """
        return None

    def placed(self, comm: Comm, size: int, dtype: np.dtype) -> str:
        """Return in words where the array of `memory` lies. Called after it, on every rank."""
        return PRIVATE

    def served_from(self, comm: Comm, state: Any, replica: Replica) -> str:
        """Return in words where servers keep the parameters, or "" without servers. Called on every rank, between two steps."""
        return ""

    def warm(self, size: int, dtype: np.dtype) -> None:
        """Compile the kernels that this strategy calls on ``size`` ranks, or load them from the cache. No communication."""

    def note(self, comm: Comm, size: int, dtype: np.dtype) -> str:
        """Return a sentence for the user before a run with gradients of ``size`` elements, or "". Collective."""
        return ""

    def figures(self, comm: Comm, state: Any, replica: Replica) -> dict[str, Any]:
        """Return this rank's entries for the summary of the run, as plain values. No communication."""
        return {}

    def init(self, comm: Comm, replica: Replica) -> Any:
        """Return the state before the first step. Called on every rank with the same parameters."""
        return {}

    def needs_gradient(self, comm: Comm, state: Any, replica: Replica, step: Step) -> bool:
        """Return whether this rank has to compute its gradient in this step. If not, `combine` gets arbitrary numbers.

        With `blocks`, called before each of them: those that are left are not computed.
        """
        return True

    def overlaps(self, comm: Comm, size: int, dtype: np.dtype) -> bool:
        """Return whether `start` communicates, so that it is worth announcing parts. The same on every rank. Collective."""
        return False

    def start(self, comm: Comm, state: Any, grad: np.ndarray, part: slice, step: Step) -> Any:
        """Called when ``grad[part]`` is final, once for each part and in the same order on every rank. Returns the state."""
        return state

    def combine_block(self, comm: Comm, state: Any, grad: np.ndarray, number: int, step: Step) -> Any:
        """Called when ``grad`` is the gradient of number ``number`` of this rank's `blocks`; the next one overwrites it.

        `combine` gets the last one. Returns the state.
        """
        return state

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        """Return the gradient for the local update. ``grad``, a sum over ``step.count`` samples, may be changed."""
        return Combined(grad, step.count, state)

    def mix(self, comm: Comm, state: Any, replica: Replica, step: Step) -> Any:
        """Exchange parameters after the update, in place. Returns the state."""
        return state

    def model(self, comm: Comm, state: Any, params: np.ndarray) -> np.ndarray | None:
        """Return the one model of all ranks; None: the mean of their parameters. ``params`` are this rank's. Collective."""
        return None

    def moments(self, comm: Comm, state: Any, replica: Replica) -> tuple[dict[str, np.ndarray], int] | None:
        """Return the optimiser's moments that belong to `model`, and the number of updates that they have seen.

        None: the mean of the ranks' moments, and each rank's own number. Called at checkpoints, and after `finish`. Collective.
        """
        return None

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        """Leave the final model in ``replica.params``. Called once, after the last step."""


def describe(thing: Any) -> str:
    """Return the text for a strategy or optimiser in messages and checkpoints, the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


def check_numbers(thing: Any) -> None:
    """Raise a `UsageError` if a field of a dataclass has a number as its default but holds something else."""
    for field in fields(thing):
        value, kind = getattr(thing, field.name), type(field.default)
        if kind in (int, float) and not isinstance(value, Integral if kind is int else Real):
            raise UsageError(f"{field.name}: got {value!r}, expected {'a whole number' if kind is int else 'a number'}")


def brief(thing: Any, *always: str) -> str:
    """``Name(field=value)`` of a dataclass: the fields in ``always``, and those that differ from their default."""
    told = [field.name for field in fields(thing) if field.name in always or getattr(thing, field.name) != field.default]
    return f"{type(thing).__name__}({', '.join(f'{name}={getattr(thing, name)!r}' for name in told)})"
