"""The parameters of one optimiser, and how a strategy exchanges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref
from zlib import crc32

import torch

from mpiddl.strategies.base import Strategy
from mpiddl.torch.facts import Steps
from mpiddl.torch.flat_tensors import by_dtype
from mpiddl.torch.local_update import LocalUpdate
from mpiddl.torch.summed_gradients import SummedGradients
from mpiddl.transport.comm import Comm

Seen = Callable[["ParameterSet", torch.Tensor], None]
"""Called after each accumulation of a gradient, with the set and the tensor."""


class ParameterSet:
    """Parameters that are updated together.

    Parameters
    ----------
    optimiser : torch.optim.Optimizer
        The user's.

    Attributes
    ----------
    fact : Steps
        For the table at the end.
    steps : int
        Steps that were taken, with those that this rank made for others.
    touched : bool
        There is a gradient of this rank that was not exchanged yet.
    """

    def __init__(self, optimiser: torch.optim.Optimizer):
        self._optimiser, self.fact = ref(optimiser), Steps(type(optimiser).__name__)
        self._groups = optimiser.param_groups
        self.summed: list[SummedGradients] = []
        self.local: list[LocalUpdate] = []
        self.tensors: list[torch.Tensor] = []
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        self._hooks: list[Any] = []
        self._numbers: dict[int, tuple[SummedGradients, int]] = {}
        self.steps = 0
        self.started = self.replaying = False
        self._scaled, self._factor = False, 1.0
        self.retired = self.exchanged = self.touched = False

    @property
    def optimiser(self) -> torch.optim.Optimizer | None:
        """The user's, as long as the program holds it."""
        return self._optimiser()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The ``param_groups`` of the optimiser; those that it had, if it is gone."""
        optimiser = self.optimiser
        if optimiser is not None:
            self._groups = optimiser.param_groups  # loading a checkpoint makes new ones
        return self._groups

    def wanted(self) -> list[torch.Tensor]:
        """The parameters that require gradients now."""
        found: dict[int, torch.Tensor] = {}
        for group in self.groups:
            found.update((id(tensor), tensor) for tensor in group["params"] if tensor.requires_grad)
        return list(found.values())

    def changed(self) -> bool:
        """Whether other parameters require gradients than when the set was built, or have another dtype, shape or memory."""
        if self.retired:
            return False
        wanted = self.wanted()
        return len(wanted) != len(self.tensors) or any(
            now is not then or (now.dtype, now.shape) != kind
            for now, then, kind in zip(wanted, self.tensors, self._kinds, strict=True)
        ) or any(each.moved() for each in self.local)

    def retire(self) -> None:
        """A later optimiser has the same parameters: their gradients are exchanged for that one."""
        self.retired = True
        for hook in self._hooks:
            hook.remove()

    def checksum(self) -> int:
        """Of the parameters."""
        found = 0
        for tensor in self.tensors:
            whole = tensor.detach().cpu().contiguous().reshape(-1)
            found = crc32((torch.view_as_real(whole) if whole.is_complex() else whole).view(torch.uint8).numpy().data, found)
        return found

    def watch(self, seen: Seen) -> None:
        """Call ``seen`` whenever a gradient of the set has been accumulated."""
        for hook in self._hooks:
            hook.remove()
        self.tensors = self.wanted()
        self.fact.parameters = len(self.tensors)
        self._kinds = [(tensor.dtype, tensor.shape) for tensor in self.tensors]
        self._hooks = [tensor.register_post_accumulate_grad_hook(lambda each: seen(self, each)) for tensor in self.tensors]

    def scale_incoming(self, factor: float, taken: set[int]) -> None:
        """Multiply every gradient by ``factor`` before it is accumulated, from now on; not those of tensors in ``taken``, by
        identity, which other sets scale. Adds its own."""
        self._factor = factor
        if factor != 1 and not self._scaled:
            self._hooks += [tensor.register_hook(lambda grad: grad * self._factor) for tensor in self.tensors
                            if id(tensor) not in taken]
            self._scaled = True
        taken.update(map(id, self.tensors))

    @torch.no_grad()
    def start(self, comm: Comm, strategy: Strategy, seen: Seen, steps: int = 0) -> None:
        """Build what the strategy needs. Collective; all ranks have the same parameters."""
        self.free()
        self.watch(seen)
        self._scaled = False
        self.started = True
        if strategy.sums_gradients:
            self.summed = [SummedGradients(comm.Dup(), strategy, tensors) for tensors in by_dtype(self.tensors).values()]
            self._numbers = {id(tensor): (each, number) for each in self.summed for number, tensor in enumerate(each.tensors)}
            return
        optimiser = self.optimiser
        assert optimiser is not None, "the coordinator drops sets of optimisers that are gone"
        for number, group in enumerate(optimiser.param_groups):
            tensors = [tensor for tensor in group["params"] if tensor.requires_grad]
            self.local += [LocalUpdate(comm.Dup(), strategy, optimiser, number, each, steps)
                           for each in by_dtype(tensors).values()]

    def free(self) -> None:
        """Collective."""
        for summed in self.summed:
            summed.Free()
        for local in self.local:
            local.Free()
        self.summed, self.local = [], []

    def exchange(self, before: float, after: float) -> None:
        """Sum the gradients over all ranks (`SummedGradients.exchange`). Collective."""
        for each in () if self.retired else self.summed:
            each.exchange(before, after)

    def overlaps(self) -> bool:
        """Whether gradients can be sent during the backward pass: the strategy does it, and no hook changes them later.

        Not those of several dtypes: ranks could send them in different order.
        """
        return not self.retired and len(self.summed) == 1 and self.summed[0].overlaps and all(
            len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ()) <= 1 for tensor in self.tensors)

    def begin(self, before: float) -> None:
        """The exchange of a backward pass begins (`SummedGradients.begin`)."""
        for each in self.summed:
            each.begin(before)

    def final(self, tensor: torch.Tensor) -> None:
        """A tensor of the set has its gradient (`SummedGradients.final`)."""
        each, number = self._numbers[id(tensor)]
        each.final(number)

    def end(self, after: float, failed: bool, dropped: bool) -> bool:
        """The backward pass is over. Returns whether it failed on a rank. Collective (`SummedGradients.end`)."""
        return sum(each.end(after, failed, dropped) for each in self.summed) > 0

    def set_aside(self) -> list[torch.Tensor | None]:
        """Copies of this rank's gradients."""
        return [None if tensor.grad is None else tensor.grad.detach().clone() for tensor in self.tensors]

    def restore(self, grads: list[torch.Tensor | None]) -> None:
        """Put back what `set_aside` returned."""
        for tensor, grad in zip(self.tensors, grads, strict=True):
            tensor.grad = grad

    def replay(self) -> None:
        """Make the step of the optimiser, with the gradients that there are, without the program."""
        self.steps += 1
        optimiser = self.optimiser
        if optimiser is None:
            return
        self.replaying = True
        try:
            type(optimiser).step(optimiser)
        finally:
            self.replaying = False

    def settings(self) -> tuple[float, ...]:
        """The numbers among the optimiser's settings, by which replicas could differ."""
        groups = self.groups
        return (len(self.tensors), *(float(value) for group in groups for value in _numbers(group)))

    def take_settings(self, groups: list[dict[str, Any]]) -> None:
        """Take over the settings of another rank, as `plain_settings` gives them."""
        for mine, theirs in zip(self.groups, groups, strict=True):
            mine.update(theirs)

    def plain_settings(self) -> list[dict[str, Any]]:
        """The optimiser's settings, without parameters."""
        return [{name: value for name, value in group.items() if name != "params"} for group in self.groups]


def _numbers(group: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for name, value in group.items():
        if name == "params":
            continue
        values = value if isinstance(value, (tuple, list)) else [value]
        found += [each for each in values if isinstance(each, (int, float)) or (
            isinstance(each, torch.Tensor) and each.numel() == 1)]
    return found


@torch.no_grad()
def broadcast(comm: Comm, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Give all ranks the values of rank ``root``. Collective."""
    for tensor in tensors:
        whole = tensor.detach().cpu().contiguous().clone()
        numbers = torch.view_as_real(whole) if whole.is_complex() else whole
        comm.Bcast(numbers.view(-1).view(torch.uint8).numpy(), root)
        if comm.rank != root:
            tensor.data.copy_(whole)  # data: a graph may have saved the tensor
