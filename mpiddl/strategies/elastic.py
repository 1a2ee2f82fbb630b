"""Elastic averaging: ranks are drawn to a centre, and the centre to them.

Every ``period`` steps w_i <- w_i - alpha (w_i - c), c <- c + alpha sum_i (w_i - c), both with the parameters as they were.
The centre c is the model; each rank has it, the same bits, since the sum is an all-reduce.
Cost: an all-reduce of V every ``period`` steps. Memory: 2 V.
Source: EASGD, Zhang, Choromanska and LeCun, NIPS 2015, arXiv:1412.6651, equations 3 and 4, alpha = 0.9/P as in section 5
[interpretation: after the update, not beside it; every ``period`` steps as in algorithm 1, but all at once].
Laws: the sum of all ranks' parameters and the centre does not change by it; with alpha = 1/P the centre is their mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.strategies.base import Replica, Step, Strategy, brief, check_numbers
from mpiddl.transport.base import IN_PLACE, Comm

BETA = 0.9
"""What the default alpha is shared out of."""


@dataclass(frozen=True, repr=False)
class Elastic(Strategy):
    """Draw parameters to a centre every ``period`` steps by ``alpha``; 0: 0.9 / P. State: the centre."""

    period: int = 8
    alpha: float = 0.0
    replicated = False

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.period < 1:
            raise UsageError(f"period: got {self.period}, wanted a number of steps, 1 or more")
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"alpha: got {self.alpha}, wanted above 0 and at most 1 / P, or 0 for 0.9 / P")

    def __repr__(self) -> str:
        return brief(self, "period")

    def check(self, size: int) -> None:
        if self.alpha * size > 1:
            raise UsageError(f"alpha: got {self.alpha} on {size} ranks, wanted at most 1 / {size}, or the centre leaves them")

    def init(self, comm: Comm, replica: Replica) -> Any:
        return {"centre": replica.params.copy(), "exchanges": 0}

    def mix(self, comm: Comm, state: Any, replica: Replica, step: Step) -> Any:
        if (step.index + 1) % self.period == 0:
            self.pull(comm, state, replica.params)
        return state

    def model(self, comm: Comm, state: Any, params: np.ndarray) -> np.ndarray:
        centre: np.ndarray = state["centre"]
        return centre

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        replica.params[:] = state["centre"]

    def figures(self, comm: Comm, state: Any, replica: Replica) -> dict[str, Any]:
        return {"exchanges": state["exchanges"]}

    def pull(self, comm: Comm, state: Any, params: np.ndarray) -> None:
        """Let ranks and centre draw each other. Collective."""
        alpha, centre = self.alpha or BETA / comm.size, state["centre"]
        apart = params - centre
        params -= alpha * apart
        comm.Allreduce(IN_PLACE, apart)
        centre += alpha * apart
        state["exchanges"] += 1
