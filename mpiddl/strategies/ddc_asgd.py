"""DDC-ASGD, dynamic delay compensation: a late gradient is damped by its delay and by the curvature of each parameter.

    t = max(tau, W - 1)                           tau: delay; W workers: the first pushes have delays of 0, 1, 2, ...
    z <- decay z + (1 - decay) g g,  h = z / (1 - decay^pushes)       over all workers' gradients
    c = (g + strength n h (w - w_pulled)) / sqrt(1 + (damping a eta n t h)^2),  a = sqrt(1 + growth (W - 1))
    v_m <- mu v_m + a c,  w <- w - eta (a c + mu v_m)

n is the number of parameters of the model, and v_m the velocity of worker m (Nesterov momentum, as in `dana`). n h estimates
the curvature, as the mean of g g does in `dc-asgd-a`. A step of size a eta overshoots if a eta times the curvature times the
delay exceeds a constant. Only in this case a late gradient is damped. The compensation is damped as well, so that it changes w
by less than strength / damping |w - w_pulled| / t. The learning rate grows with the number of workers, which balances the
damping: one learning rate works for 1 and for 32 workers. At small learning rates nothing is damped; the rule is then `dana`
with compensation.

Cost: as `parameter_server`; memory for one more copy of the shard, and the moments once for each worker.
Sources: the look-ahead, Hakimi et al. 2019, arXiv:1907.11612 (DANA-Slim); the compensation, Zheng et al., ICML 2017,
arXiv:1609.08326; the damping by delay and curvature and the growth are ours. Laws: with one worker it is Nesterov's momentum,
bit for bit; with strength, damping and growth 0 it is `dana`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np

from mpiddl import kernels
from mpiddl.errors import UsageError
from mpiddl.strategies.parameter_server import ParameterServer
from mpiddl.strategies.push import Push


@dataclass(frozen=True)
class DDCASGD(ParameterServer):
    """Parameter server with damped and compensated gradients, and a momentum for each worker.

    Parameters
    ----------
    servers : int
        Number of serving ranks (`ParameterServer`).
    damping : float
        Damping of late gradients, per parameter, update of delay and unit of the learning rate; 0: none.
    strength : float
        Strength of the compensation, per parameter; 0: none. Without damping the compensation is not bounded.
    decay : float
        Decay of the mean squares.
    growth : float
        Growth of the square of the learning rate with each additional worker; 0: none.
    """

    damping: float = 1.0
    strength: float = 0.04
    decay: float = 0.98
    growth: float = 0.5
    own_moments = True
    optimisers = ("nesterov",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("damping", "strength", "growth"):
            if not 0 <= getattr(self, name) < inf:
                raise UsageError(f"{name}: got {getattr(self, name)}, expected 0 or more")
        if not 0 <= self.decay < 1:
            raise UsageError(f"decay: got {self.decay}, expected a number from 0 to below 1")

    def arrays(self, workers: int, like: np.ndarray) -> dict[str, Any]:
        return {"square": np.zeros_like(like)}

    def correct(self, state: dict[str, Any], push: Push) -> float:
        delay, growth = max(push.delay, push.workers - 1), sqrt(1 + self.growth * (push.workers - 1))
        correction = 1 / (1 - self.decay ** (state["version"] + 1))
        damping = self.damping * growth * push.rate * push.size * delay
        numbers = self.decay, 1 - self.decay, correction, self.strength * push.size, damping
        real = push.grad.dtype.type
        kernels.compensate_damped(push.grad, push.params, push.before, state["square"], *map(real, numbers))
        return growth
