"""Elastic averaging: ranks are drawn to a centre, and the centre to them.

Every ``period`` steps w_i <- w_i - alpha (w_i - c), c <- c + alpha sum_i (w_i - c), both with the parameters as they were.
The centre c is the model; each rank has it, the same bits, since the sum is an all-reduce.
Cost: an all-reduce of V every ``period`` steps. Memory: 2 V.
Source: EASGD, Zhang, Choromanska and LeCun, NIPS 2015, arXiv:1412.6651, equations 3 and 4, alpha = 0.9/P as in section 5
[interpretation: after the update, not beside it; every ``period`` steps as in algorithm 1, but all at once, unless ranks go at
their own pace].
Laws: the sum of all ranks' parameters and the centre does not change by it; with alpha = 1/P the centre is their mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.strategies.base import Replica, Step, Strategy, brief, check_numbers
from mpiddl.strategies.elastic_own_pace import ElasticOwnPace
from mpiddl.strategies.graphs import SYMMETRIC
from mpiddl.strategies.own_pace import OWN_PACE, TOGETHER, WHOLE, check_pace
from mpiddl.transport.base import IN_PLACE, Comm

BETA = 0.9
"""What the default alpha is shared out of."""


@dataclass(frozen=True, repr=False)
class Elastic(Strategy):
    """Draw parameters to a centre every ``period`` steps by ``alpha``; 0: 0.9 / P. State: the centre.

    ``pace``: ranks take their steps ``together``, or each at its ``own`` pace (`mpiddl.strategies.elastic_own_pace`).
    """

    period: int = 8
    alpha: float = 0.0
    pace: str = TOGETHER
    replicated = False
    direction = SYMMETRIC

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.period < 1:
            raise UsageError(f"period: got {self.period}, expected a number of steps, 1 or more")
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"alpha: got {self.alpha}, expected above 0 and at most 1 / P, or 0 for 0.9 / P")

        check_pace(self.pace)

    def __repr__(self) -> str:
        return brief(self, "period")

    def resolve(self, comm: Comm) -> tuple[Strategy, str]:
        return (ElasticOwnPace(self), "") if self.pace == OWN_PACE else (self, "")

    def check(self, size: int) -> None:
        if self.alpha * size > 1:
            raise UsageError(f"alpha: got {self.alpha} on {size} ranks, expected at most 1 / {size}, or the centre leaves them")

    def init(self, comm: Comm, replica: Replica) -> Any:
        return {"centre": replica.params.copy(), "exchanges": 0}

    def mix(self, comm: Comm, state: Any, replica: Replica, step: Step) -> Any:
        if self.wants(state, replica.params, step):
            self.pull(comm, state, replica.params)
            self.taken(state, replica.params, WHOLE, 0, step.index + 1)
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
        alpha, centre = self.share(comm.size), state["centre"]
        apart = params - centre
        params -= alpha * apart
        comm.Allreduce(IN_PLACE, apart)
        centre += alpha * apart

    def share(self, size: int) -> float:
        """Alpha on ``size`` ranks."""
        return self.alpha or BETA / size

    def wants(self, state: Any, params: np.ndarray, step: Step) -> bool:
        """Whether an exchange is wanted after ``step``."""
        return (step.index + 1) % self.period == 0

    def begin(self, state: Any, params: np.ndarray, part: slice) -> None:
        """What comes before an exchange at its own pace."""

    def taken(self, state: Any, params: np.ndarray, part: slice, number: int, index: int) -> None:
        """What follows an exchange, ``index`` steps having been done."""
        state["exchanges"] += 1

    def peers(self, number: int, rank: int, size: int) -> list[int]:
        """Whom ``rank`` may ask at its own pace: who has the centre."""
        return [0] if rank else []

    def asked(self, state: Any, params: np.ndarray, index: int) -> None:
        """A rank that goes at its own pace has asked, ``index`` steps having been done."""

    def observe(self, state: Any, moved: int, step: Step) -> None:
        """A rank that goes at its own pace has done a step, with ``moved`` exchanges in it."""
