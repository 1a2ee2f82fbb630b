"""What is replaced in PyTorch while `mpiddl run` runs a program, and what is only listened to.

Listened to, by documented hooks: steps of optimisers (``register_optimizer_step_pre_hook``, ``..._post_hook``) and gradients as
they accumulate (``Tensor.register_post_accumulate_grad_hook``), and modules as they get their parameters
(``register_module_parameter_registration_hook``). Replaced, because there is no hook:

- ``torch.optim.Optimizer.__init__``, to know the parameters before their first gradient;
- ``torch.utils.data.DataLoader.__iter__``, to divide batches;
- ``torch.autograd.backward``, to know whether a loss is a mean or a sum;
- ``torch.nn.Module.__call__``, to divide forward passes of programs without a loader;
- ``torch.distributed.init_process_group``, to refuse programs that distribute themselves;
- ``torch.save`` and ``torch.load``, to write the state of the strategy beside a checkpoint, and to read it.

`remove` undoes all of it. The program's random state, defaults and weights are left alone.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from mpiddl.errors import UsageError
from mpiddl.torch.batch_dimension import least_samples
from mpiddl.torch.coordinator import Coordinator
from mpiddl.torch.divided_forward import DividedForward
from mpiddl.torch.loss_reduction import is_sum
from mpiddl.torch.other_parameters import OtherParameters
from mpiddl.torch.sharded_loader import PlainLoader, Sharded


class Interception:
    """PyTorch as a program sees it on the ranks of ``coordinator``."""

    def __init__(self, coordinator: Coordinator):
        self.coordinator = coordinator
        self._loaders: WeakKeyDictionary[DataLoader[Any], Sharded] = WeakKeyDictionary()
        self._modules: WeakKeyDictionary[torch.nn.Module, None] = WeakKeyDictionary()  # in the same order on all ranks
        self._undo: list[Callable[[], None]] = []
        self._inside, self._place = False, (os.getpid(), threading.get_ident())
        self._replace(Optimizer, "__init__", self._optimizer_init)
        self._replace(DataLoader, "__iter__", self._loader_iter)
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(torch, "save", self._save)
        self._replace(torch, "load", self._load)
        self._forward = DividedForward(coordinator)
        self._replace(torch.nn.Module, "__call__", self._module_call)
        if torch.distributed.is_available():
            self._replace(torch.distributed, "init_process_group", self._init_process_group)
        for hook in (register_optimizer_step_pre_hook(self._before_step), register_optimizer_step_post_hook(self._after_step),
                     register_module_parameter_registration_hook(lambda module, name, param: self._modules.setdefault(module))):
            self._undo.append(hook.remove)

    def remove(self) -> None:
        """Put back everything."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        before = getattr(owner, name)
        setattr(owner, name, functools.wraps(before)(make(before)))
        self._undo.append(lambda: setattr(owner, name, before))

    def _optimizer_init(self, before: Any) -> Any:
        def init(optimiser: Optimizer, *args: Any, **options: Any) -> None:
            before(optimiser, *args, **options)
            if self.coordinator.find(optimiser) is None:
                self.coordinator.add(optimiser)

        return init

    def _loader_iter(self, before: Any) -> Any:
        def iterate(loader: DataLoader[Any]) -> Any:
            if isinstance(loader, PlainLoader):
                return before(loader)
            sharded = self._trains() and not self.coordinator.over
            self.coordinator.facts.loader(_described(loader), sharded)
            if not sharded:
                return before(loader)
            if loader not in self._loaders:
                self._loaders[loader] = Sharded(loader, self.coordinator)
            self.coordinator.least = least_samples(self._modules)
            self.coordinator.look(list(self._modules))
            return self._loaders[loader].epoch(reader=sys._getframe(1).f_globals.get("__name__", ""))

        return iterate

    def _trains(self) -> bool:
        """Whether a loader that is iterated now gives batches to train on that can be divided.

        Not if all that is trained is in evaluation mode. L-BFGS needs the loss of the whole batch: its passes are divided.
        """
        optimisers = [each.optimiser for each in self.coordinator.sets if not isinstance(each, OtherParameters)]
        if optimisers and isinstance(optimisers[-1], torch.optim.LBFGS):
            return False
        updated = {id(tensor) for each in self.coordinator.sets for tensor in each.tensors}
        modes = {each.training for module in list(self._modules) for each in module.modules()
                 if any(id(tensor) in updated for tensor in each.parameters(recurse=False))}
        return torch.is_grad_enabled() and bool(self.coordinator.sets) and modes != {False}

    def _backward(self, before: Any) -> Any:
        def backward(tensors: Any, *args: Any, **options: Any) -> Any:
            if self._inside:  # a checkpoint's pass in the program's
                return before(tensors, *args, **options)
            self.coordinator.loss(is_sum(tensors))
            self._inside = True
            try:
                return before(tensors, *args, **options)
            except Exception as error:
                self.coordinator.failed(error)
                raise
            finally:
                self._inside = False

        return backward

    def _save(self, before: Any) -> Any:
        def save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
            before(obj, f, *args, **options)
            if isinstance(f, (str, os.PathLike)) and (os.getpid(), threading.get_ident()) == self._place:
                self.coordinator.saved(obj, os.path.abspath(f))

        return save

    def _load(self, before: Any) -> Any:
        def load(f: Any, *args: Any, **options: Any) -> Any:
            found = before(f, *args, **options)
            if isinstance(f, (str, os.PathLike)):
                self.coordinator.loaded(os.path.abspath(f))
            return found

        return load

    def _init_process_group(self, before: Any) -> Any:
        def init(*args: Any, **options: Any) -> Any:
            if options.get("world_size") != 1:
                raise UsageError("program: got a call of torch.distributed.init_process_group under `mpiddl run`, expected a "
                                 "program for one process. Start this one without `mpiddl run`, with the backend \"mpiddl\"")
            return before(*args, **options)

        return init

    def _module_call(self, before: Any) -> Any:
        divided = self._forward

        def call(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() or divided.inside:
                return before(module, *args, **options)
            self._modules.setdefault(module)
            return divided.call(module, args, options, before)

        return call

    def _before_step(self, optimiser: Optimizer, args: Any, options: Any) -> Any:
        if self.coordinator.find(optimiser) is None and self.coordinator.strategy.sums_gradients:  # a copy of another one
            self.coordinator.add(optimiser)
        found = self.coordinator.find(optimiser)
        return None if found is None else self.coordinator.step_begins(found, args, options)

    def _after_step(self, optimiser: Optimizer, args: Any, options: Any) -> None:
        if (found := self.coordinator.find(optimiser)) is not None:
            self.coordinator.step_ends(found)


def _described(loader: DataLoader[Any]) -> str:
    kind = type(loader.dataset).__name__
    try:
        length = f"{len(loader.dataset)} samples"
    except (TypeError, NotImplementedError):
        length = "unknown length"
    return f"{type(loader).__name__} of {kind} ({length}, batch {loader.batch_size})"


