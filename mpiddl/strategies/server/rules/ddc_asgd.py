"""DDC-ASGD, dynamic delay compensation: steps of late gradients are damped, most where the curvature is large.

    t = max(tau, W - 1)                       tau: delay; W workers: the first pushes have delays of 0, 1, 2, ...
    h <- decay h + (1 - decay) g g            one for all workers' gradients
    s <- decay s + (1 - decay) sum |g_j|      for each layer, j over the layer: weights and bias together
    k = sqrt(h) s                             h and s each divided by 1 - decay^pushes
    d = a / sqrt(1 + (damping a eta t k)^2),  a = sqrt(1 + growth (W - 1))
    v_m <- mu v_m + g,  w <- w - eta d (g + mu v_m)

v_m is the velocity of worker m (Nesterov momentum, as in `dana`). k estimates a bound of the curvature: for any gradients,
E[g g^T] <= diag(sqrt(h_i) sum_j sqrt(h_j)) by Cauchy-Schwarz, and the mean of |g_j| takes the place of sqrt(h_j). A step of
size a eta overshoots if a eta times the curvature times the delay exceeds a constant. Only in this case a step is damped.
Parameters whose gradient is always zero do not change k. The learning rate grows with the number of workers, which balances
the damping: one learning rate works for 1 and for 32 workers. At small learning rates nothing is damped; the rule is then
`dana` with a larger rate.

With an optimiser whose updates are not proportional to gradients, such as Adam, eta is not the size of a step, and the
optimiser itself divides by the magnitudes of gradients. Nothing is damped then, and the rate does not grow.

Layers may lie on several servers: a worker computes the sums over its whole gradient, and sends them with each part of it.
Cost: as with any rule, and 8 bytes for each layer; memory for two more copies of the shard, and the moments once for each
worker. Sources: the look-ahead, Hakimi et al. 2019, arXiv:1907.11612 (DANA-Slim); the damping by delay and curvature and the
growth are ours. The published rule of this name is `mpiddl.strategies.server.rules.ddc_asgd_literal`. Laws: with one worker it
is Nesterov's momentum, bit for bit; with damping and growth 0 it is `dana`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np

from mpiddl import kernels
from mpiddl.errors import UsageError
from mpiddl.strategies.server.push import Push
from mpiddl.strategies.server.rule import Rule


@dataclass(frozen=True)
class DDCASGD(Rule):
    """Rule with damped steps, and a momentum for each worker.

    Parameters
    ----------
    servers : int
        Number of serving ranks (`Rule`).
    damping : float
        Damping of late gradients, per update of delay, unit of the learning rate and unit of the curvature; 0: none.
    decay : float
        Decay of the mean squares and of the mean sums.
    growth : float
        Growth of the square of the learning rate with each additional worker; 0: none.
    """

    damping: float = 10.0
    decay: float = 0.98
    growth: float = 0.5
    own_moments = True
    sums_layers = True
    needs_pulled = False
    optimisers = ("nesterov",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("damping", "growth"):
            if not 0 <= getattr(self, name) < inf:
                raise UsageError(f"{name}: got {getattr(self, name)}, expected 0 or more")
        if not 0 <= self.decay < 1:
            raise UsageError(f"decay: got {self.decay}, expected a number from 0 to below 1")

    def arrays(self, workers: int, like: np.ndarray, layers: int) -> dict[str, Any]:
        return {"square": np.zeros_like(like), "layer sums": np.zeros(layers)}

    def update(self, state: dict[str, Any], push: Push, apply: Callable[..., None]) -> None:
        if not push.proportional:
            apply(push.params, push.grad, push.moments, push.rate, 1.0, push.applied)
            return
        sums = state["layer sums"]
        sums *= self.decay
        sums += (1 - self.decay) * push.sums
        late, growth = max(push.delay, push.workers - 1), sqrt(1 + self.growth * (push.workers - 1))
        fresh = 1 / (1 - self.decay ** (state["version"] + 1))
        moved = push.params.copy()
        apply(moved, push.grad, push.moments, push.rate, 1.0, push.applied)
        for number, part in push.layers:
            damping = self.damping * growth * push.rate * late * fresh**1.5 * float(sums[number])
            numbers = map(push.grad.dtype.type, (self.decay, 1 - self.decay, damping**2, growth))
            kernels.damped_move(push.params[part], moved[part], push.grad[part], state["square"][part], *numbers)
