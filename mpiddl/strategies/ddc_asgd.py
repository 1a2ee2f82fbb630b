"""DDC-ASGD, dynamic delay compensation: each push's own delay sets the trust in it, and in the momentum that it meets.

    t = max(tau, W - 1)         W workers: the first pushes come with delays of 0, 1, 2, ... and would be trusted too much
    a = 1 / (1 + t / reference)
    s_m <- decay s_m + (1 - decay) g g,   c = g + strength / sqrt(s_m + 1e-7) g g (w - w_pulled)
    v_m <- mu v_m + a c,   w <- w - eta (a c + mu v_m)      for worker m's own velocity v_m

Momentum of each worker's own with Nesterov's look-ahead (`dana`), damping by the delay, and the compensation of `dc-asgd-a`.
Cost: `parameter_server`; a server's moments and another copy of its shard for each worker.
Source: the look-ahead of Hakimi et al. 2019, arXiv:1907.11612 (DANA-Slim); the compensation of Zheng et al., ICML 2017,
arXiv:1609.08326; their union and the damping are ours. Laws: with one worker it is Nesterov's momentum, bit for bit; with
strength 0 and an infinite reference it is `dana`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.strategies.dc_asgd import DCASGDAdaptive, compensate_adaptively
from mpiddl.strategies.parameter_server import Push


@dataclass(frozen=True)
class DDCASGD(DCASGDAdaptive):
    """Damped, compensated, each worker with its momentum.

    Parameters
    ----------
    servers : int
    strength : float
        Of the compensation; 2 to 20 serve alike, 0 is none.
    decay : float
        Of the mean squares.
    reference : float
        The delay at which a gradient counts half: 1 / (1 - momentum) updates are what a velocity remembers.
    """

    strength: float = 8.0
    reference: float = 10.0
    own_moments = True
    optimisers = ("nesterov",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reference > 0:
            raise UsageError(f"reference: got {self.reference}, wanted a delay above 0")

    def arrays(self, workers: int, like: np.ndarray) -> dict[str, Any]:
        return super().arrays(workers, like) if self.strength else {}

    def correct(self, state: dict[str, Any], push: Push) -> float:
        if self.strength:
            compensate_adaptively(state, push, self.strength, self.decay)
        return 1 / (1 + max(push.delay, push.workers - 1) / self.reference)
