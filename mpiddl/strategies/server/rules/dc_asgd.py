"""Delay-compensated asynchronous SGD: a late gradient is corrected for the change of the parameters since the pull.

g <- g + lambda g * g * (w - w_pulled), elementwise, then the optimiser's step. ``dc-asgd-c``: lambda is ``strength``.
``dc-asgd-a``: lambda = strength / sqrt(s + 1e-7), s <- decay s + (1 - decay) g * g, for each worker. The source uses
plain SGD; ``dc-asgd-momentum`` is ``dc-asgd-c`` with one velocity for all workers, v <- mu v + g [interpretation].
Cost: as with any rule; for ``dc-asgd-a`` another copy of a server's shard for each worker.
Source: Zheng et al., ICML 2017, arXiv:1609.08326, algorithms 1 and 2. Law: with strength 0 it is `asgd`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl import kernels
from mpiddl.errors import UsageError
from mpiddl.strategies.server.push import Push
from mpiddl.strategies.server.rule import Rule

EPS = 1e-7


@dataclass(frozen=True)
class DCASGD(Rule):
    """Compensation with constant ``strength``."""

    strength: float = 0.04

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.strength < np.inf:
            raise UsageError(f"strength: got {self.strength}, expected 0 or more")

    def correct(self, state: dict[str, Any], push: Push) -> float:
        kernels.compensate(push.grad, push.params, push.before, push.grad.dtype.type(self.strength))
        return 1.0


@dataclass(frozen=True)
class DCASGDMomentum(DCASGD):
    """Compensation with constant ``strength``, for optimisers with momentum."""

    optimisers = ("momentum", "nesterov")


@dataclass(frozen=True)
class DCASGDAdaptive(DCASGD):
    """Compensation with ``strength`` divided by the root mean square of a worker's gradients."""

    strength: float = 2.0
    decay: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise UsageError(f"decay: got {self.decay}, expected a number from 0 to below 1")

    def arrays(self, workers: int, like: np.ndarray, layers: int) -> dict[str, Any]:
        return {"square": np.zeros((workers, like.size), like.dtype)}

    def correct(self, state: dict[str, Any], push: Push) -> float:
        numbers = map(push.grad.dtype.type, (self.strength, self.decay, 1 - self.decay, EPS))
        kernels.compensate_scaled(push.grad, push.params, push.before, state["square"][push.worker], *numbers)
        return 1.0
