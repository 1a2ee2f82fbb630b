"""An optimiser of PyTorch as a function of flat arrays, for strategies that make updates themselves.

Parameter servers and provisional updates apply an optimiser to a part of the parameters, on copies. A copy of the user's
optimiser, with one flat parameter, makes such an update. That is the same update only if the optimiser treats each element by
itself, as SGD, Adam and most others do; `elementwise` finds out by a trial on six numbers.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

SEED = 27
"""Of the numbers in the trial."""


class FlatUpdate:
    """One group of an optimiser, as a function of flat arrays. It works on when the optimiser is gone.

    Parameters
    ----------
    optimiser : torch.optim.Optimizer
        Copied, without its state.
    group : callable
        Returns the group's settings of this moment.
    dtype : torch.dtype

    Attributes
    ----------
    names : list of str
        Entries of the optimiser's state that have the shape of a parameter: its moments.
    """

    def __init__(self, optimiser: torch.optim.Optimizer, group: Callable[[], dict[str, Any]], dtype: torch.dtype):
        self._optimiser, self._group, self._dtype = copy.copy(optimiser), group, dtype
        self._optimiser.param_groups, self._optimiser.state = [], defaultdict(dict)
        self._scalars: dict[str, Any] = {}
        self.names = self._moments()

    def __call__(self, params: np.ndarray, grad: np.ndarray, moments: dict[str, np.ndarray], rate: float, scale: float = 1.0,
                 step: int = 0) -> None:
        """Make one update of ``params`` with ``scale * grad``; see `mpiddl.optim.Optimiser`."""
        tensor = torch.from_numpy(params).requires_grad_()
        tensor.grad = torch.tensor(grad * grad.dtype.type(scale) if scale != 1.0 else grad)
        twin = self._twin([tensor], rate)
        first = step == 0 and not any(array.any() for array in moments.values())
        if moments and not first:
            twin.state[tensor] = {**self._counters(step), **{name: torch.from_numpy(moments[name]) for name in self.names}}
        _step(twin)
        for name, array in moments.items():
            value = twin.state[tensor].get(name)
            if value is not None and value.data_ptr() != array.ctypes.data:
                array[:] = value.detach().numpy()

    def trouble(self) -> str:
        """Why this optimiser is no function of flat arrays, or ""."""
        other = sorted(set(self._scalars) - {"step"})
        if other:
            return f"its state has {other[0]!r}, a number that is no count of steps"
        return "" if self.elementwise() else "its update of an element depends on other elements, or it needs a closure"

    def elementwise(self) -> bool:
        """Whether an update of two parameters is that of both, joined: two steps, with other gradients in each."""
        start, *grads = self._numbers()
        joined, apart = (self._after(start.split(sizes), [grad.split(sizes) for grad in grads]) for sizes in ([6], [4, 2]))
        return joined is not None and apart is not None and bool(torch.allclose(joined, apart, rtol=1e-5, atol=1e-7))

    def proportional(self) -> bool:
        """Whether twice the gradients move parameters twice as far, from zeros: two steps."""
        start, *grads = self._numbers()
        once, twice = (self._after([torch.zeros_like(start)], [[factor * grad] for grad in grads]) for factor in (1, 2))
        return once is not None and twice is not None and bool(torch.allclose(2 * once, twice, rtol=1e-5, atol=1e-7))

    def _numbers(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(SEED)
        return [torch.randn(6, generator=generator, dtype=self._dtype) for _ in range(3)]

    def _after(self, start: Sequence[torch.Tensor], grads: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor | None:
        """Parameters that begin at ``start``, joined, after a step with each of ``grads``; None if it makes no steps."""
        params = [part.clone().requires_grad_() for part in start]
        twin = self._twin(params)
        try:
            for each in grads:
                for param, part in zip(params, each, strict=True):
                    param.grad = part.clone()
                _step(twin)
        except (RuntimeError, TypeError, ValueError):
            return None
        return torch.cat([param.detach() for param in params])

    def _twin(self, params: list[torch.Tensor], rate: float | None = None) -> torch.optim.Optimizer:
        """The optimiser with other parameters, and no hooks and state."""
        twin = copy.copy(self._optimiser)
        lr = {} if rate is None else {"lr": rate}
        twin.param_groups = [{**self._group(), "params": params, **lr}]
        twin.state = defaultdict(dict)
        twin._optimizer_step_pre_hooks = OrderedDict()
        twin._optimizer_step_post_hooks = OrderedDict()
        for param in params:  # some optimisers make their state when they are made
            for name, value in self._made_early().items():
                twin.state[param][name] = torch.full_like(param, value) if value is not None else torch.tensor(0.0)
        return twin

    def _made_early(self) -> dict[str, float | None]:
        """State that exists before the first step: the value of a moment, or None for a counter."""
        if isinstance(self._optimiser, torch.optim.Adagrad):
            return {"sum": float(self._group()["initial_accumulator_value"]), "step": None}
        return {}

    def _moments(self) -> list[str]:
        """Found by a step of a copy."""
        tensor = torch.zeros(3, dtype=self._dtype).requires_grad_()
        tensor.grad = torch.ones_like(tensor)
        twin = self._twin([tensor])
        try:
            _step(twin)
        except (RuntimeError, TypeError, ValueError):
            return []
        state = twin.state[tensor]
        self._scalars = {name: value for name, value in state.items() if not _is_moment(value, tensor)}
        return [name for name, value in state.items() if _is_moment(value, tensor)]

    def _counters(self, step: int) -> dict[str, Any]:
        """The other entries of the state, after ``step`` steps."""
        return {name: torch.full_like(value, step) if isinstance(value, torch.Tensor) else step
                for name, value in self._scalars.items() if value is not None}


def _is_moment(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


def _step(optimiser: torch.optim.Optimizer) -> None:
    """A step by the class's own function: a scheduler may have put another one into the object."""
    type(optimiser).step(optimiser)
