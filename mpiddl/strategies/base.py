"""The strategy interface: how ranks agree on one model.

A strategy is eight functions, all optional; what is not written is the identity. Two more, `note` and `figures`, say
something about it to the user, `resolve` lets one choose another by the ranks that there are, and `warm` compiles its kernels.

    placement   which shards a rank trains on
    memory      where the gradient is made, if a collective wants to find it there
    init        the strategy's state before the first step
    start       a part of the gradient is final: its exchange may begin while the rest is computed
    combine     the gradients of a step, before the local update
    mix         the parameters, after it
    model       the one model that ranks stand for whose parameters differ
    finish      the end: every rank leaves with the model it believes in

State is a value: a nest of dicts, lists, numbers, arrays and `Pending` results, passed in and returned. Whatever is in it
is saved in a checkpoint and restored, results in flight included; a strategy writes no code for that.

The loop (`mpiddl.loop`) calls, for each step::

    score = model.gradient(...)              calling  state = start(comm, state, grad, part, step)  on the way
    combined = combine(comm, state, grad, replica, step)
    if combined.count: the optimiser's update with combined.grad / combined.count
    state = mix(comm, combined.state, replica, step)

A rank that owns the update but no data is written the same way: its `placement` says how many clients it ``serves``,
its `combine` receives a gradient, its `mix` answers with the parameters, and ``stop`` in what `combine` returns ends its
loop, whatever the steps of the others.
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
from mpiddl.transport.base import Comm, Request


class Placement(NamedTuple):
    """What a rank does.

    shards : the shards it trains on, each from 0 to the number of shards - 1.
    serves : 0 for a rank that trains. A rank that serves has no end of its own: it loops until `combine` says stop, and
        ``serves`` loops in which something was applied count as one step of the learning-rate schedule.
    endless : a rank that trains has no end of its own, either.
    """

    shards: Sequence[int]
    serves: int = 0
    endless: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Where the loop stands; the counts are what a gradient sum has to be divided by to be a mean.

    index : steps this rank has done before this one.
    count : samples in this rank's own gradient.
    total : samples in the global batch, over all ranks.
    rate : the learning rate of the step.
    steps : of the whole run.
    meet : how many are between two meetings of all ranks, for validation and checkpoints; 0: there are none.
    """

    index: int
    count: int
    total: int
    rate: float
    steps: int = 0
    meet: int = 0


def _nobody(*args: Any) -> Any:
    raise UsageError("replica.apply, replica.rate: there is no optimiser here, expected a replica of a training loop")


class Replica:
    """What a rank trains: the flat parameters and the optimiser's flat moments, to be changed in place.

    ``replica.params += x`` and ``replica.params[:] = x`` change them; ``replica.params = x`` would not, and is refused.
    ``replica.apply(params, grad, moments, rate, scale, step)`` takes a step of the run's optimiser on any such arrays, the
    gradient being clipped as the run wants it. ``replica.rate(steps)`` is the learning rate after so many steps of the run,
    ``replica.begun`` how many steps a run that is continued had taken before, ``replica.updates`` how many updates its moments
    have seen, ``replica.tensors`` where each array of the model lies in the parameters.
    """

    __slots__ = ("_params", "apply", "begun", "moments", "rate", "tensors", "updates")

    def __init__(self, params: np.ndarray, moments: dict[str, np.ndarray], apply: Callable[..., None] = _nobody,
                 rate: Callable[[float], float] = _nobody, begun: int = 0, updates: int = 0, tensors: Sequence[slice] = ()):
        self._params, self.moments, self.apply, self.rate = params, moments, apply, rate
        self.begun, self.updates = begun, updates
        self.tensors = tensors or [slice(0, params.size)]

    @property
    def params(self) -> np.ndarray:
        return self._params

    @params.setter
    def params(self, value: np.ndarray) -> None:
        if value is not self._params:
            raise AttributeError("replica.params: got another array; change it in place, replica.params[:] = ...")


@dataclass(frozen=True, slots=True)
class Combined:
    """What `combine` makes of a gradient.

    grad : the sum of per-sample gradients that the local update takes, shape (n,). It may be read-only: in memory that
        several ranks read.
    count : how many samples it sums; 0 means no local update in this step.
    state : the strategy's new state.
    stop : this rank has done its last step (its `mix` is not called again, its `finish` is).
    updates : what the strategy has applied itself.
    meet : all ranks are told so after the same exchange: now they may communicate between steps, though not in lockstep.
    """

    grad: np.ndarray
    count: int
    state: Any
    stop: bool = False
    updates: int = 0
    meet: bool = False


class Pending:
    """An array that a started operation is still writing; `wait` returns it once it is complete.

    A checkpoint waits for every `Pending` in a state and saves the array; restored, it is complete from the start.
    """

    def __init__(self, array: np.ndarray, request: Request | None = None):
        self._array, self._request = array, request

    def wait(self) -> np.ndarray:
        if self._request is not None:
            self._request.Wait()
            self._request = None
        return self._array


class Strategy:
    """The identity in every function; see the module's text for when each is called.

    replicated : after `mix` the parameters, or what `model` says, and the moments are the same bits on every rank (checked at
        each checkpoint).
    guesses : between steps parameters are a guess at what is not known yet, which nobody else may change.
    lockstep : all ranks take the same steps together, so that the loop may communicate between steps (validation,
        checkpoints, time limits) without holding anybody up.
    sums_gradients : every step applies the sum of all ranks' gradients and nothing else is exchanged, so that any other
        strategy that says this takes the same steps, to rounding. Said by each class for itself.
    by_shard : the gradient of a rank is wanted as the sum, in a binary tree, of one gradient for each of its shards.
    optimisers : the names of those it goes with; none: any.
    """

    replicated: bool = True
    guesses: bool = False
    lockstep: bool = True
    sums_gradients: bool = False
    by_shard: bool = False
    optimisers: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}()"

    def resolve(self, comm: Comm) -> tuple[Strategy, str]:
        """The strategy that runs on these ranks, the same on all: this one, unless it has a choice to make; and what the user
        should know about that, or nothing. Called once, before anything but `check`. Collective.
        """
        return self, ""

    def check(self, size: int) -> None:
        """Raise a `UsageError` if the strategy cannot run on ``size`` ranks."""

    def placement(self, shards: int, rank: int, size: int) -> Placement:
        """What ``rank`` of ``size`` does; by default a contiguous run of the ``shards`` virtual shards."""
        return Placement(rank_shards(shards, size, rank))

    def memory(self, comm: Comm, size: int, dtype: np.dtype) -> np.ndarray | None:
        """Where the gradient shall be made: an array of shape ``(size,)`` and ``dtype``, or None for memory of the rank's own.

        Called on every rank, before the first step.
        """
        return None

    def warm(self, size: int, dtype: np.dtype) -> None:
        """Compile, or load from the cache, the kernels that this strategy calls itself on ``size`` ranks; it does not talk."""

    def note(self, comm: Comm, size: int, dtype: np.dtype) -> str:
        """What the user should know before a run with gradients of ``size`` elements: a sentence, or nothing. Collective."""
        return ""

    def figures(self, comm: Comm, state: Any, replica: Replica) -> dict[str, Any]:
        """What the summary of a run says about its communication: plain values. This rank's; it does not talk."""
        return {}

    def init(self, comm: Comm, replica: Replica) -> Any:
        """State before the first step. Called on every rank with the same parameters."""
        return {}

    def start(self, comm: Comm, state: Any, grad: np.ndarray, part: slice, step: Step) -> Any:
        """``grad[part]`` is final. Called once for each part, in the same order on every rank; returns the state."""
        return state

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        """What the local update takes. ``grad`` is this rank's sum over ``step.count`` samples and may be overwritten."""
        return Combined(grad, step.count, state)

    def mix(self, comm: Comm, state: Any, replica: Replica, step: Step) -> Any:
        """Exchange parameters after the update, in place; returns the state."""
        return state

    def model(self, comm: Comm, state: Any, params: np.ndarray) -> np.ndarray | None:
        """The one model that ranks stand for, ``params`` being this one's; None: the mean of theirs. Collective."""
        return None

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        """Leave in ``replica.params`` the model this rank believes in. Called once, after the last step."""


def describe(thing: Any) -> str:
    """What a strategy or optimiser is called in messages and checkpoints: the same text in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


def check_numbers(thing: Any) -> None:
    """Raise a `UsageError` where a field of a dataclass whose default is a number holds something else."""
    for field in fields(thing):
        value, kind = getattr(thing, field.name), type(field.default)
        if kind in (int, float) and not isinstance(value, Integral if kind is int else Real):
            raise UsageError(f"{field.name}: got {value!r}, expected {'a whole number' if kind is int else 'a number'}")


def brief(thing: Any, *always: str) -> str:
    """``Name(field=value)`` of a dataclass: the fields that are ``always`` told, and those that are not as usual."""
    told = [field.name for field in fields(thing) if field.name in always or getattr(thing, field.name) != field.default]
    return f"{type(thing).__name__}({', '.join(f'{name}={getattr(thing, name)!r}' for name in told)})"
