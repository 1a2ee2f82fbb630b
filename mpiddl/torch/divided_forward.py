"""Forward passes of modules, divided over ranks by samples, in programs that have no `DataLoader` to divide.

All ranks call a module with the same samples. Each computes a part of them; all get the whole result, and go on with it as one
rank would: with the loss, a hidden state, a condition to stop. In the backward pass each rank differentiates its part, and the
gradients of the parameters are summed over ranks before they are accumulated. It does not matter whether an optimiser or the
program's own arithmetic uses them.

A trial finds the dimension of the samples (`mpiddl.torch.batch_dimension`). Before each pass, ranks compare checksums of the
samples. Where they differ, every rank computes its own samples, and the mean of the gradients over ranks is accumulated.

Inside a batch of a divided loader, a pass only draws other random numbers on each rank.

Cost: a meeting for each pass, forward and backward; an all-reduce of flags; an all-gather of the results; the strategy's, for
the gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

from mpiddl.layout import block
from mpiddl.torch.batch_dimension import (
    Division,
    Part,
    Reduced,
    find_division,
    least_samples,
    samples_in,
    tensors_of,
    unflattened,
    with_tensors,
)
from mpiddl.torch.coordinator import Coordinator
from mpiddl.torch.divided_tensors import counted_once, gathered, own_part, reduced, shared, summed
from mpiddl.torch.flat_tensors import by_dtype
from mpiddl.torch.meeting import Passing
from mpiddl.torch.parameter_set import broadcast
from mpiddl.torch.summed_gradients import SummedGradients
from mpiddl.transport.base import IN_PLACE

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments."""

MOST_FORMS = 32
"""Of the arguments of a module, each of which takes a trial."""

OWN_STREAM = 0x6D706464
"""Upper half of the seeds of numbers that are one rank's own. A checkpoint restores them before it calls a module once more."""

NO_BACKWARD_PASS = -1
"""What autograd returns as the running backward pass outside of one. Checkpoints call modules once more inside one."""


@dataclass
class Known:
    """What is known of a module.

    number : counted from 0 in the order of their first calls.
    divisions : by form of the arguments; a sentence where they cannot be divided.
    refused : a sentence if it is never divided.
    tried : a pass was divided.
    sums : what sums the gradients of parameters, by those that require gradients.
    """

    number: int
    divisions: dict[Any, Division | str] = field(default_factory=dict)
    refused: str = ""
    tried: bool = False
    sums: dict[tuple[int, ...], list[SummedGradients]] = field(default_factory=dict)


class DividedForward:
    """The forward passes of a program on the ranks of ``coordinator``."""

    def __init__(self, coordinator: Coordinator):
        self._coordinator, self._comm, self._facts = coordinator, coordinator.comm, coordinator.facts
        self._known: WeakKeyDictionary[torch.nn.Module, Known] = WeakKeyDictionary()
        self.inside = False

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any], whole: Callable[..., Any]) -> Any:
        """What ``module(*args, **options)`` returns. ``whole`` computes it on one rank."""
        self.inside = True
        try:
            if self._coordinator.in_batch() and module.training and torch.initial_seed() >> 32 != OWN_STREAM:
                with _random_numbers(self._comm.rank):  # each rank drops out other units of its samples
                    return whole(module, *args, **options)
            return self._divided(module, (args, options), whole) if self._trains(module) else whole(module, *args, **options)
        finally:
            self.inside = False

    def _trains(self, module: torch.nn.Module) -> bool:
        """Whether this is a pass for a gradient of a module, outside a loader that is divided already."""
        return (self._coordinator.divides_passes() and torch.is_grad_enabled() and module.training
                and threading.current_thread() is threading.main_thread()
                and torch._C._current_graph_task_id() == NO_BACKWARD_PASS and not torch.jit.is_tracing()
                and torch._C._functorch.peek_interpreter_stack() is None
                and any(param.requires_grad for param in module.parameters()) and not any(map(is_lazy, module.parameters())))

    def _divided(self, module: torch.nn.Module, call: Call, whole: Callable[..., Any]) -> Any:
        coordinator, inputs, name = self._coordinator, tensors_of(call), type(uncompiled(module)).__name__
        if not coordinator.strategy.sums_gradients:
            self._facts.forward(name, "the strategy exchanges models, and divides only the batches of a DataLoader")
            return whole(module, *call[0], **call[1])
        known = self._known.setdefault(module, Known(len(self._known)))
        known.refused = known.refused or _refused(module, inputs)
        passing = coordinator.pass_begins(_checksum(known, inputs))
        division, samples, why = None, 0, known.refused
        if passing is Passing.SAME and not why:
            division, samples, why = self._division(known, module, call, inputs)
        if passing is Passing.ALONE or why:
            if passing is not Passing.SAME:
                coordinator.pass_differs()
            self._facts.forward(name, why or "other ranks were ahead")
            return whole(module, *call[0], **call[1])
        try:
            if division is None:
                found = self._with_summed_gradients(known, module, call, coordinator.share)
            else:
                found = self._part(known, module, call, inputs, division, samples)
        except _NotAlike as failure:  # on all ranks
            self._facts.forward(name, str(failure))
            return whole(module, *call[0], **call[1])
        if not known.tried:
            known.tried = True
            if _reenters(found):
                known.refused = "it uses checkpoints with use_reentrant=True"
                return self._divided(module, call, whole)
        self._facts.forward(name, "", samples)
        return found

    def _division(self, known: Known, module: torch.nn.Module, call: Call,
                  inputs: Sequence[Tensor]) -> tuple[Division | None, int, str]:
        """How this call is divided, and its samples; or why it is not. Collective with the first call of a form."""
        leaves, spec = tree_flatten(call)
        form = (str(spec), tuple((each.ndim, each.dtype) if isinstance(each, Tensor) else
                                 each if isinstance(each, (bool, int, str)) else type(each) for each in leaves))
        if form not in known.divisions and len(known.divisions) == MOST_FORMS:
            known.refused = f"it is called with more than {MOST_FORMS} forms of arguments"
            return None, 0, known.refused
        if form not in known.divisions:
            if not known.divisions:
                broadcast(self._comm, [*module.parameters(), *module.buffers()])
            comm = self._comm
            known.divisions[form] = find_division(uncompiled(module), call, comm.size, comm.rank, comm.allgather)
        division = known.divisions[form]
        if isinstance(division, str):
            return None, 0, division
        samples = samples_in(inputs, division.inputs)
        least = self._comm.size * least_samples(module.modules())
        if samples is None or samples < least:
            return None, 0, f"{samples or 'an unclear number of'} samples; {least} or more can be divided"
        return division, samples, ""

    # A pass of all ranks

    def _part(self, known: Known, module: torch.nn.Module, call: Call, inputs: Sequence[Tensor], division: Division,
              samples: int) -> Any:
        """What the module returns for ``samples``; each rank computes a part of it."""
        comm = self._comm
        common = [each for each, place in zip(inputs, division.inputs, strict=True) if place is None and each.requires_grad]
        used = iter(shared(common, self._plain_sum))
        parts = [own_part(each, comm, place.dim) if place is not None else next(used) if each.requires_grad else each
                 for each, place in zip(inputs, division.inputs, strict=True)]
        found = self._with_summed_gradients(known, module, with_tensors(call, parts), 1.0)
        if len(tensors_of(found)) != len(division.outputs):  # on all ranks
            known.refused = "its result in training is not like that in evaluation mode"
            raise _NotAlike(known.refused)
        kept = len(block(samples, comm.size, comm.rank))
        return with_tensors(found, [self._whole(tensor, place, samples, kept)
                                    for tensor, place in zip(tensors_of(found), division.outputs, strict=True)])

    def _whole(self, tensor: Tensor, place: Part, samples: int, kept: int) -> Tensor:
        """An output for all ``samples``, of which this rank has computed ``kept``."""
        if place is None:
            return counted_once(tensor, self._comm.size)
        if isinstance(place, Reduced):
            return reduced(tensor, self._comm, kept / samples if place.mean else 1.0)
        part, dim = unflattened(tensor, place, kept)
        whole = gathered(part, self._comm, dim, samples)
        return whole.flatten(place.dim, place.dim + 1) if part.ndim > tensor.ndim else whole

    def _with_summed_gradients(self, known: Known, module: torch.nn.Module, call: Call, factor: float) -> Any:
        """What the module returns for this rank's samples. Gradients become the sum over ranks of ``factor`` times theirs.

        Raises
        ------
        _NotAlike
            The module has raised an error on some rank. On all ranks.
        """
        named = {name: param for name, param in module.named_parameters() if param.requires_grad}
        tensors = list(named.values())
        sums = self._sums(known, tensors)
        params = dict(zip(named, shared(tensors, lambda grads: self._sum(sums, tensors, grads, factor)), strict=True))
        before = [(buffer, buffer._version) for buffer in module.buffers()]
        found, failure = None, None
        with _random_numbers(self._comm.rank):
            try:
                found = functional_call(module, params, *call)
            except Exception as error:
                failure = error
        self._settle(module, before, failure)
        return found

    def _sums(self, known: Known, tensors: list[Tensor]) -> list[SummedGradients]:
        """What sums the gradients of these parameters. Collective when they are new."""
        key = tuple(map(id, tensors))
        if key not in known.sums:
            strategy = self._coordinator.strategy
            known.sums[key] = [SummedGradients(self._comm.Dup(), strategy, each) for each in by_dtype(tensors).values()]
        return known.sums[key]

    def _sum(self, sums: list[SummedGradients], tensors: list[Tensor], grads: Sequence[Tensor | None],
             factor: float) -> list[Tensor | None]:
        self._coordinator.pass_differentiated()
        given = dict(zip(map(id, tensors), grads, strict=True))
        found: dict[int, Tensor | None] = {}
        for each in sums:
            mine = [given[id(tensor)] for tensor in each.tensors]
            for tensor, grad, total in zip(each.tensors, mine, each.total(mine, factor, 1.0), strict=True):
                sparse = total is not None and grad is not None and grad.is_sparse
                found[id(tensor)] = total if total is None else total.to_sparse(1) if sparse else total.clone()
        return [found[id(tensor)] for tensor in tensors]

    def _plain_sum(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The sum over ranks of gradients that are no parameters'; all ranks have the same ones."""
        self._coordinator.pass_differentiated()
        return [None if grad is None else summed(grad, self._comm) for grad in grads]

    def _settle(self, module: torch.nn.Module, before: list[tuple[Tensor, int]], failure: Exception | None) -> None:
        """Agree on errors, and on buffers that the pass has changed: those become the mean over ranks."""
        buffers = list(module.buffers())
        changed = [now is not then or now._version != version for now, (then, version) in zip(buffers, before, strict=False)]
        flags = np.array([failure is not None, *changed[: len(before)], *[0] * (len(before) - len(changed))], np.int32)
        self._comm.Allreduce(IN_PLACE, flags)
        if flags[0]:
            raise _NotAlike("it raised an error") from failure
        for buffer, there in zip(buffers, flags[1:], strict=False):
            if there and buffer.is_floating_point():
                buffer.data.copy_(summed(buffer, self._comm) / self._comm.size)  # data: the graph may have saved the buffer


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module of which `torch.compile` has made ``module``; the module itself if it was not compiled."""
    return getattr(module, "_orig_mod", module)


class _NotAlike(Exception):
    """A pass cannot be divided as the trial has found. On all ranks."""


def _refused(module: torch.nn.Module, inputs: Sequence[Tensor]) -> str:
    """Why no trial is made, or ""."""
    if not inputs:
        return "it is called without tensors"
    if any(each.layout != torch.strided or each.is_nested for each in inputs):
        return "it is called with sparse or nested tensors"
    for each in module.modules():
        if isinstance(each, torch.jit.ScriptModule):
            return "it is compiled by torch.jit"
        if getattr(each, "max_norm", None) is not None:
            return "it changes its parameters (max_norm)"
        for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values(), *each._backward_hooks.values()):
            if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch."):
                return "it has hooks of the program"
    return ""


def _checksum(known: Known, inputs: Sequence[Tensor]) -> int:
    """Of what this rank is about to compute."""
    found = crc32(repr((known.number, known.refused, [(str(each.dtype), tuple(each.shape)) for each in inputs])).encode())
    for each in inputs:
        if each.layout == torch.strided and not each.is_nested:
            plain = each.detach().cpu().resolve_conj().resolve_neg()
            found = crc32(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def _reenters(found: Any) -> bool:
    """Whether a backward pass runs in the graph of a result: it accumulates gradients that nothing sums over ranks."""
    waiting = [tensor.grad_fn for tensor in tensors_of(found)]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting += [below for below, _ in node.next_functions]
    return False


class _random_numbers:
    """Other random numbers on each rank inside; afterwards, the same state on all of them: as before if none were drawn."""

    def __init__(self, rank: int):
        self._rank = rank

    def __enter__(self) -> None:
        generator = torch.default_generator
        self._before = generator.get_state()
        seed = int(torch.randint(1 << 31, (), generator=generator))
        self._next = generator.get_state()
        generator.manual_seed(OWN_STREAM << 32 | seed + self._rank)
        self._inside = generator.get_state()

    def __exit__(self, *error: Any) -> None:
        generator = torch.default_generator
        drawn = not torch.equal(generator.get_state(), self._inside)
        generator.set_state(self._next if drawn else self._before)


