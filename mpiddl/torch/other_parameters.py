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
    """What the set has in the place of an optimiser."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": []}]

    def state_dict(self) -> None:
        """There is no state."""


class OtherParameters(ParameterSet):
    """The set of such parameters. It is one of the program's sets as soon as it has one.

    Attributes
    ----------
    found : set of int
        Numbers of parameters with a gradient that are in no set yet.
    possible : bool
        The next gradient may be one of such a parameter: no exchange has shown yet that there is none.
    """

    def __init__(self) -> None:
        self._holder: Any = NoOptimiser()  # a set does not keep its optimiser alive
        super().__init__(self._holder)
        self.found, self.possible, self._used = set[int](), False, False
        self._candidates: list[ref[torch.Tensor]] = []
        self._watched: dict[int, Any] = {}
        self._elsewhere: set[int] = set()

    def look(self, modules: Iterable[torch.nn.Module], sets: ParameterSets, seen: Callable[[int], None]) -> None:
        """Have ``seen`` called with the number of each parameter of ``modules`` that is in no set and gets a gradient."""
        self._elsewhere.clear()
        known = {id(tensor) for each in sets for tensor in each.tensors}
        for number in [number for number in self._watched if id(self._tensor(number)) in known]:
            self._watched.pop(number).remove()
        known.update(id(self._tensor(number)) for number in self._watched)
        for module in modules:
            for tensor in module.parameters(recurse=False):
                if tensor.requires_grad and id(tensor) not in known:
                    number = len(self._candidates)
                    self._candidates.append(ref(tensor))
                    self._watched[number] = tensor.register_post_accumulate_grad_hook(lambda _, number=number: seen(number))
                    known.add(id(tensor))
                    self.possible = True

    def finds(self, number: int, sets: ParameterSets) -> bool:
        """Whether parameter ``number``, which has got a gradient, is in no set."""
        if number not in self.found and number not in self._elsewhere:
            tensor = self._tensor(number)
            elsewhere = any(tensor is other for each in sets for other in each.tensors)
            (self._elsewhere if elsewhere else self.found).add(number)
        return number in self.found

    def join(self, comm: Comm, strategy: Strategy, sets: ParameterSets, seen: Seen, factor: float) -> bool:
        """Put the parameters that any rank has found into the set, and the set into ``sets``. Collective.

        Returns whether all ranks have these parameters; else nothing changes.

        ``factor``: what their gradients of this pass are multiplied by, as `scale_incoming` does with others.
        """
        mine, self.found = sorted(self.found), set()
        theirs = comm.allgather({number: _kind(self._tensor(number)) for number in mine})
        kinds = {number: kind for each in theirs for number, kind in each.items()}
        if not all(comm.allgather(all(_kind(self._tensor(number)) == kind for number, kind in kinds.items()))):
            return False
        for tensor in map(self._tensor, mine if factor != 1 else ()):
            if tensor is not None and tensor.grad is not None:
                tensor.grad.mul_(factor)
        self.touched = self.touched or bool(mine)
        for number in kinds.keys() & self._watched.keys():
            self._watched.pop(number).remove()
        added = [tensor for tensor in map(self._tensor, sorted(kinds)) if tensor is not None]
        sets.grow(self, added)
        self.groups[0]["params"] += added
        self.start(comm, strategy, seen)
        return True

    def used(self) -> None:
        """Gradients were exchanged: the program may update the parameters now."""
        self._used = True

    def updated(self) -> None:
        """The program has come to the next batch, or to the end of the loop: it has updated the parameters if it does so."""
        self.steps += self._used
        self._used = False

    def wanted(self) -> list[torch.Tensor]:
        return list(self.groups[0]["params"])

    def changed(self) -> bool:
        return False

    def retire(self) -> None:
        """It may get further parameters: a later optimiser of the present ones does not end it."""

    def _tensor(self, number: int) -> torch.Tensor | None:
        return self._candidates[number]() if number < len(self._candidates) else None


def _kind(tensor: torch.Tensor | None) -> tuple[str, tuple[int, ...]] | None:
    return None if tensor is None else (str(tensor.dtype), tuple(tensor.shape))
