"""Update rules of parameter servers: which arrays a server keeps, and how the gradient of a push is applied.

A rule is a value. `mpiddl.strategies.server.parameter_server` runs any rule, one-sided or two-sided.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpiddl import kernels
from mpiddl.errors import UsageError
from mpiddl.strategies.server.push import Push

AUTO, ONE_SIDED, TWO_SIDED = COMMUNICATION = "auto", "one-sided", "two-sided"

TAKEN = ("params", "version", "pulled", "counts", "left", "delays", "met", "told", "held", "here", "begun", "seen", "before",
         "moments", "sums", "over", "serves")
"""Names of what servers keep themselves."""


@dataclass(frozen=True)
class Rule:
    """The optimiser's update with the gradient as it is.

    Derived classes correct a push, scale its learning rate, and choose the moments that it uses.

    servers : number of serving ranks; 0: all ranks if one-sided, one rank if two-sided.
    communication : "two-sided" (`mpiddl.strategies.server.two_sided`), "one-sided" (`mpiddl.strategies.server.one_sided`), or
        "auto": one-sided where it works.
    own_moments : each worker has its own moments.
    sums_layers : workers send, with each gradient, the sums of its magnitudes over each layer of the model.
    needs_pulled : `correct` or `update` reads ``Push.before``, the parameters that the worker pulled. A rule that does not need
        them should say so: workers on other nodes may then read a shard without its server (`one_sided`).
    bound : steps that a worker may be ahead of the slowest one, 0 or more (two-sided only); -1: no limit.
    optimisers : names of the optimisers that the rule works with; empty: all.
    """

    servers: int = 0
    communication: str = AUTO
    own_moments = False
    sums_layers = False
    needs_pulled = True
    bound = -1
    optimisers: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not {"servers", "communication"} <= inspect.signature(type(self)).parameters.keys():
            raise UsageError(f"rule: got {type(self).__name__} with a constructor of its own, expected a dataclass whose "
                             "fields are its parameters")
        if self.servers < 0:
            raise UsageError(f"servers: got {self.servers}, expected 1 or more, or 0 for an automatic choice")
        if self.communication not in COMMUNICATION:
            close = difflib.get_close_matches(self.communication, COMMUNICATION, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"communication: got {self.communication!r}, expected one of {', '.join(COMMUNICATION)}{hint}")

    def correct(self, state: dict[str, Any], push: Push) -> float:
        """Correct ``push.grad``, ``push.rate`` or ``push.moments`` in place. Returns a factor for the gradient."""
        return 1.0

    def update(self, state: dict[str, Any], push: Push, apply: Callable[..., None]) -> None:
        """Make the update of a push with the optimiser's ``apply`` (`Replica`), after `correct`."""
        factor = self.correct(state, push)
        apply(push.params, push.grad, push.moments, push.rate, factor, push.applied)

    def arrays(self, workers: int, like: np.ndarray, layers: int) -> dict[str, Any]:
        """Arrays that `update` keeps for a shard, beside the parameters; ``layers`` of the whole model."""
        return {}

    def check_arrays(self, workers: int, like: np.ndarray, layers: int) -> None:
        """Raise a `UsageError` for anything else than arrays under names of their own. Called on all ranks."""
        for name, array in self.arrays(workers, like, layers).items():
            if not isinstance(array, np.ndarray) or name in TAKEN or name.startswith("moment."):
                raise UsageError(f"rule {type(self).__name__}: arrays: got {name!r} of type {type(array).__name__}, expected "
                                 f"numpy arrays under other names than {', '.join(TAKEN)} and moment.*")

    def layer_sums(self, grad: np.ndarray, layers: Sequence[slice]) -> np.ndarray:
        """What a worker sends with a gradient: the sum of its magnitudes over each layer, float64, or nothing."""
        return np.array([kernels.sum_of_magnitudes(grad[part]) for part in layers] if self.sums_layers else [], float)

    @property
    def serving(self) -> int:
        """Number of ranks that only serve, if two-sided."""
        return self.servers or 1

    def check_size(self, size: int) -> None:
        """Raise a `UsageError` if there are not enough parameters for all servers."""
        if self.serving > size:
            raise UsageError(f"servers: got {self.serving} for {size} parameters, expected at most {size}, one per parameter")
