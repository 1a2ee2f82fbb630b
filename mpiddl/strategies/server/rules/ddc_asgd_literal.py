"""The published DDC-ASGD: learning rate, momentum and compensation of a late gradient depend on its delay.

    a = 1 / (1 + tau)^p                                             tau: delay
    s_m <- decay s_m + (1 - decay) g g                              for each worker m
    lambda = strength min(1, tau / reference) / sqrt(s_m + 1e-7)
    v <- mu a^q v + a (g + lambda g g (w - w_pulled)),  w <- w - eta v         one velocity for all workers

Cost: as with any rule; another copy of a server's shard for each worker.
Source: dynamic delay compensation as an extension of Zheng et al., ICML 2017, arXiv:1609.08326 [interpretation: the exponents,
and the learning rate outside the velocity, so that a changing rate takes effect at once].
Laws: with delays of 0 it is the momentum of one rank, bit for bit; with p, q and strength 0 it is `asgd`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from mpiddl import kernels
from mpiddl.errors import UsageError
from mpiddl.strategies.server.push import Push
from mpiddl.strategies.server.rule import Rule
from mpiddl.strategies.server.rules.dc_asgd import EPS


@dataclass(frozen=True)
class DDCASGDLiteral(Rule):
    """Rule whose rate, momentum and compensation depend on the delay.

    Parameters
    ----------
    servers : int
        Number of serving ranks (`Rule`).
    p, q : float
        Exponents of the learning rate, and of the momentum relative to it.
    strength : float
        Strength of the compensation; 0: none.
    reference : float
        Delay, in updates, from which the compensation has its full strength.
    decay : float
        Decay of the mean squares.
    """

    p: float = 0.5
    q: float = 0.5
    strength: float = 2.0
    reference: float = 10.0
    decay: float = 0.95
    optimisers = ("momentum", "nesterov")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("p", "q", "strength"):
            if not 0 <= getattr(self, name) < inf:
                raise UsageError(f"{name}: got {getattr(self, name)}, expected 0 or more")
        if not 0 < self.reference < inf:
            raise UsageError(f"reference: got {self.reference}, expected a number of updates above 0")
        if not 0 <= self.decay < 1:
            raise UsageError(f"decay: got {self.decay}, expected a number from 0 to below 1")

    def arrays(self, workers: int, like: np.ndarray, layers: int) -> dict[str, Any]:
        return {"square": np.zeros((workers, like.size), like.dtype)}

    def correct(self, state: dict[str, Any], push: Push) -> float:
        strength = self.strength * min(1.0, push.delay / self.reference)
        numbers = map(push.grad.dtype.type, (strength, self.decay, 1 - self.decay, EPS))
        kernels.compensate_scaled(push.grad, push.params, push.before, state["square"][push.worker], *numbers)
        factor: float = (1 + push.delay) ** -self.p
        for moment in push.moments.values():
            moment *= factor**self.q
        return factor
