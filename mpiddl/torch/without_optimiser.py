"""Parameters that get gradients inside a divided loader and belong to no optimiser.

The program updates them by hand, or its optimiser has some of the model's parameters only, and clips the gradients of all. They
are found by their gradients: the first exchange after one makes a set of them, whose gradients are summed like those of an
optimiser's parameters. The set grows with each further parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch

from mpiddl.strategies.base import Strategy
from mpiddl.torch.parameter_set import ParameterSet, Seen
from mpiddl.torch.parameter_sets import ParameterSets
from mpiddl.transport.comm import Comm


class NoOptimiser:
    """What such parameters have in the place of an optimiser."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": []}]

    def state_dict(self) -> None:
        """There is no state."""


class OtherParameters(ParameterSet):
    """The set. It changes in `WithoutOptimiser.join` only."""

    def __init__(self) -> None:
        self._holder: Any = NoOptimiser()
        super().__init__(self._holder)

    def wanted(self) -> list[torch.Tensor]:
        return list(self._holder.param_groups[0]["params"])

    def changed(self) -> bool:
        return False


class WithoutOptimiser:
    """Finds such parameters.

    Attributes
    ----------
    set : OtherParameters
        One of the sets of the program as soon as it has a parameter.
    found : set of int
        Numbers of parameters with a gradient that are in no set yet.
    possible : bool
        The next gradient may be one of such a parameter: no exchange has shown yet that there is none.
    """

    def __init__(self) -> None:
        self.set, self.found, self.possible = OtherParameters(), set[int](), False
        self._known: list[ref[torch.Tensor]] = []
        self._numbers: dict[int, int] = {}
        self._pending = False

    def look(self, modules: Iterable[torch.nn.Module], sets: ParameterSets, seen: Callable[[int], None]) -> None:
        """Have ``seen`` called with the number of each parameter of ``modules`` that is in no set and gets a gradient."""
        taken = {id(tensor) for each in sets for tensor in each.tensors}
        for module in modules:
            for tensor in module.parameters(recurse=False):
                number = self._numbers.get(id(tensor), -1)
                if not tensor.requires_grad or id(tensor) in taken or (number >= 0 and self._known[number]() is tensor):
                    continue
                self._numbers[id(tensor)] = number = len(self._known)
                self._known.append(ref(tensor))
                tensor.register_post_accumulate_grad_hook(lambda _, number=number: seen(number))
                self.possible = True

    def seen(self, number: int, sets: ParameterSets) -> bool:
        """Parameter ``number`` has got a gradient. Returns whether it is in no set."""
        if number not in self.found and (tensor := self._known[number]()) is not None and not any(
                tensor is other for each in sets for other in each.tensors):
            self.found.add(number)
        return number in self.found

    def join(self, comm: Comm, strategy: Strategy, sets: ParameterSets, seen: Seen, factor: float) -> bool:
        """Put the parameters that any rank has found into the set, which then is one of ``sets``. Collective.

        Returns whether all ranks have these parameters; else the set is as before.

        ``factor``: what their gradients of this pass are multiplied by, as `ParameterSet.scale_incoming` does with others.
        """
        theirs = comm.allgather({number: _kind(self._tensor(number)) for number in self.found})
        union = {number: kind for each in theirs for number, kind in each.items()}
        tensors = {number: self._tensor(number) for number in sorted(union)}
        mine, self.found = self.found, set()
        if not all(comm.allgather(all(_kind(tensors[number]) == kind for number, kind in union.items()))):
            return False
        for number in mine if factor != 1 else ():
            if (tensor := tensors[number]) is not None and tensor.grad is not None:
                tensor.grad.mul_(factor)
        self.set.touched = self.set.touched or bool(mine)
        new = [tensor for tensor in tensors.values()
               if tensor is not None and not any(tensor is other for other in self.set.tensors)]
        sets.grow(self.set, new)
        self.set.groups[0]["params"] += new
        self.set.start(comm, strategy, seen)
        return True

    def _tensor(self, number: int) -> torch.Tensor | None:
        return self._known[number]() if number < len(self._known) else None

    def exchanged(self) -> None:
        """The program may update the parameters now."""
        self._pending = True

    def updated(self) -> None:
        """The program has come to the next batch, or to the end of the loop: what `exchanged` has announced is a step."""
        self.set.steps += self._pending
        self._pending = False


def _kind(tensor: torch.Tensor | None) -> tuple[str, tuple[int, ...]] | None:
    return None if tensor is None else (str(tensor.dtype), tuple(tensor.shape))
