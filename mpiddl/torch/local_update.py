"""The parameters of one group of an optimiser, under a strategy that does more than sum gradients.

Before the optimiser's step the strategy gets the gradient of this rank and returns the gradient of the update, or none. After
it, the strategy mixes parameters with other ranks. Parameters, gradients and moments are flat arrays that share memory with the
program's tensors, so that nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref
from zlib import crc32

import numpy as np
import torch

from mpiddl.errors import UsageError
from mpiddl.memory import FlatBuffer, aligned_zeros
from mpiddl.strategies.base import Replica, Step, Strategy
from mpiddl.strategies.periodic.averages import average
from mpiddl.strategies.server.one_sided import OneSided
from mpiddl.strategies.server.two_sided import TwoSided
from mpiddl.torch.flat_tensors import SHARED, over_numpy, share
from mpiddl.torch.flat_update import FlatUpdate
from mpiddl.transport.comm import Comm

ENDLESS = 1 << 40
"""Steps of a run whose length is not known before its end."""


class LocalUpdate:
    """Parameters of one dtype and one group of an optimiser.

    Parameters
    ----------
    comm : Comm
        Used for this alone; freed with `Free`.
    strategy : Strategy
        Resolved.
    optimiser : torch.optim.Optimizer
        The user's.
    group : int
        Number of one of its ``param_groups``.
    tensors : sequence of torch.Tensor
        Parameters of the group that require gradients, float32 or float64, on the CPU.
    steps : int
        Steps of the whole run, for strategies that plan; 0 if not known.
    """

    def __init__(self, comm: Comm, strategy: Strategy, optimiser: torch.optim.Optimizer, group: int,
                 tensors: Sequence[torch.Tensor], steps: int = 0):
        first = tensors[0]
        if first.dtype not in SHARED or first.device.type != "cpu":
            raise UsageError(f"strategy {strategy!r}: got parameters of type {first.dtype} on {first.device}, expected float32 "
                             "or float64 on the CPU; strategies that sum gradients, such as auto, take all types and devices")
        self._comm, self.strategy, self.tensors, self._steps = comm, strategy, list(tensors), steps or ENDLESS
        self._optimiser, self._number, self._found = ref(optimiser), group, optimiser.param_groups[group]
        self._update = FlatUpdate(optimiser, lambda: self._group, first.dtype)
        if needs_apply(strategy) and (why := self._update.trouble()):
            raise UsageError(f"strategy {strategy!r}: got the optimiser {type(optimiser).__name__}: {why}; expected an "
                             "optimiser such as SGD or Adam, or a strategy that sums gradients, such as auto")
        kind = SHARED[first.dtype]
        shapes = {str(number): tuple(tensor.shape) for number, tensor in enumerate(tensors)}
        buffer = FlatBuffer(shapes, kind)
        self._params = buffer.flat
        share(tensors, self._params)
        self._places = [tensor.data_ptr() for tensor in tensors]
        memory = strategy.memory(comm, self._params.size, kind)
        self._grad = aligned_zeros(self._params.size, kind) if memory is None else memory
        self._own = over_numpy(self._grad, tensors)
        self._result = aligned_zeros(self._params.size, kind)
        self._given = over_numpy(self._result, tensors)
        self._moments = {name: aligned_zeros(self._params.size, kind) for name in self._update.names}
        self._views = {name: over_numpy(array, tensors) for name, array in self._moments.items()}
        self._replica = Replica(self._params, self._moments, self._update, lambda steps: float(self._group["lr"]),
                                tensors=list(buffer.slices.values()), layers=buffer.layers,
                                proportional=self._update.proportional())
        self._adopt()
        self._state: Any = strategy.init(comm, self._replica)
        self._index = 0
        self._rate: Any = None
        self._hidden: tuple[np.ndarray, int] | None = None

    @property
    def _group(self) -> dict[str, Any]:
        """The settings of the optimiser; those that it had, if it is gone."""
        optimiser = self._optimiser()
        if optimiser is not None:
            self._found = optimiser.param_groups[self._number]  # loading a checkpoint makes new ones
        return self._found

    @torch.no_grad()
    def before_step(self, samples: int, total: int, sums: bool) -> None:
        """The strategy's part before the update; ``samples`` of this rank and in ``total``.

        ``sums``: the loss is a sum over the samples, not their mean.
        """
        present = self._take(min(samples, 1) if sums else samples)
        step = self._step(samples, total)
        combined = self.strategy.combine(self._comm, self._state, self._grad, self._replica, step)
        self._state = combined.state
        if combined.count:
            np.multiply(combined.grad, self._grad.dtype.type((total if sums else 1) / combined.count), out=self._result)
        for tensor, given, layout in zip(self.tensors, self._given, present, strict=True):
            if not combined.count or (layout is None and not self.strategy.sums):
                tensor.grad = None
            else:
                tensor.grad = given.to_sparse(1) if layout == torch.sparse_coo else given
        if combined.rate != 1.0:
            self._rate, self._group["lr"] = self._group["lr"], self._group["lr"] * combined.rate
        self._replica.updates += combined.updates + bool(combined.count)

    @torch.no_grad()
    def after_step(self, samples: int, total: int) -> None:
        """The strategy's part after the update."""
        if self._rate is not None:
            self._group["lr"], self._rate = self._rate, None
        self._adopt()
        self._state = self.strategy.mix(self._comm, self._state, self._replica, self._step(samples, total))
        self._index += 1

    def _step(self, samples: int, total: int) -> Step:
        return Step(self._index, samples, total, float(self._group["lr"]), self._steps)

    def _take(self, factor: float) -> list[torch.layout | None]:
        """Copy the gradients into the flat array, times ``factor``. Returns their layouts; None where there is no gradient."""
        for tensor, own in zip(self.tensors, self._own, strict=True):
            if tensor.grad is None:
                own.zero_()
            else:
                grad = tensor.grad.to_dense() if tensor.grad.layout != torch.strided else tensor.grad
                torch.mul(grad.detach(), factor, out=own)
        return [None if tensor.grad is None else tensor.grad.layout for tensor in self.tensors]

    def _adopt(self) -> None:
        """Move the moments of the optimiser into the flat arrays, where it has made or loaded new ones."""
        optimiser = self._optimiser()
        if optimiser is None:
            return
        for name, views in self._views.items():
            for tensor, view in zip(self.tensors, views, strict=True):
                value = optimiser.state[tensor].get(name) if tensor in optimiser.state else None
                if isinstance(value, torch.Tensor) and value.data_ptr() != view.data_ptr():
                    view.copy_(value)
                    optimiser.state[tensor][name] = view

    def moved(self) -> bool:
        """Whether the program has put other memory under its parameters."""
        return any(tensor.data_ptr() != place for tensor, place in zip(self.tensors, self._places, strict=True))

    @torch.no_grad()
    def common(self) -> np.ndarray | None:
        """The common model of all ranks: the strategy's, or the mean. None: it is in the parameters. Collective."""
        if self.strategy.replicated and not self.strategy.guesses:
            return None
        model = self.strategy.model(self._comm, self._state, self._own_params())
        if model is not None:
            return model
        mean = self._own_params().copy()
        average(self._comm, mean, self._comm.size)
        return mean

    def show_common(self) -> None:
        """Put the common model of all ranks into the parameters, until `hide_common`. Collective."""
        model = self.common()
        if model is None:
            return
        own = self._own_params()
        own = own.copy() if own is self._params else own
        self._params[:] = model
        self._hidden = own, crc32(self._params.data)

    def hide_common(self) -> None:
        """Put the parameters of this rank back, unless the program has changed them since `show_common`."""
        own, self._hidden = self._own_params(), None
        if own is not self._params:
            self._params[:] = own

    def _own_params(self) -> np.ndarray:
        """The parameters of this rank: hidden ones, unless the program has changed those that it sees."""
        if self._hidden is not None and crc32(self._params.data) != self._hidden[1]:
            self._hidden = None
        return self._params if self._hidden is None else self._hidden[0]

    def checksum(self) -> int:
        """Of the parameters that the program sees."""
        return crc32(self._params.data)

    def saved(self) -> dict[str, Any]:
        """What `take` needs to continue from here: nested dicts of numbers and arrays."""
        return {"params": self._own_params(), "moments": self._moments, "index": self._index, "updates": self._replica.updates,
                "strategy": self._state}

    def fits(self, saved: dict[str, Any]) -> bool:
        """Whether `take` can use it."""
        arrays = [saved["params"], *saved["moments"].values()]
        return all(array.shape == self._params.shape and array.dtype == self._params.dtype for array in arrays) and all(
            isinstance(saved[name], int) for name in ("index", "updates")) and "strategy" in saved

    def take(self, saved: dict[str, Any]) -> None:
        """Continue from what `saved` returned. Moments only if the program has loaded those of its optimiser."""
        optimiser = self._optimiser()
        self._params[:] = saved["params"]
        if optimiser is not None and any(tensor in optimiser.state for tensor in self.tensors):
            self._replica.updates = saved["updates"]
            for name in self._moments.keys() & saved["moments"].keys():
                self._moments[name][:] = saved["moments"][name]
        self._index, self._state = saved["index"], saved["strategy"]

    def finish(self) -> None:
        """Leave the final model in the parameters. Collective."""
        self.strategy.finish(self._comm, self._state, self._replica)

    def Free(self) -> None:
        """Collective."""
        self._comm.Free()


def needs_apply(strategy: Strategy) -> bool:
    """Whether a strategy makes updates with the optimiser itself."""
    return isinstance(strategy, (OneSided, TwoSided)) or strategy.guesses or not strategy.lockstep
