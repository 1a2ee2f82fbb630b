"""Elastic averaging: ranks are pulled towards a common centre, and the centre towards the ranks.

Every ``period`` steps w_i <- w_i - alpha (w_i - c), c <- c + alpha sum_i (w_i - c), both with the old parameters. The centre c
is the model. Each rank holds it, with the same bits, because the sum is an all-reduce. Cost: an all-reduce of V every
``period`` steps. Memory: 2 V. Source: EASGD, Zhang, Choromanska and LeCun, NIPS 2015, arXiv:1412.6651, equations 3 and 4, alpha
= 0.9/P as in section 5 [interpretation: after the update, not at the same time; every ``period`` steps as in algorithm 1, but
on all ranks together unless ``pace`` is own; each sample has the same weight (`mpiddl.strategies.periodic.averages`); ranks
without rows are not pulled]. Laws: it keeps the sum of the centre and all ranks' parameters; with alpha = 1/P the centre is
their mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.strategies.base import Combined, Replica, Step, Strategy, brief, check_numbers
from mpiddl.strategies.gossip.asynchronous import OWN_PACE, TOGETHER, WHOLE, check_pace
from mpiddl.strategies.gossip.elastic_asynchronous import ElasticOwnPace
from mpiddl.strategies.gossip.graphs import SYMMETRIC
from mpiddl.strategies.periodic.averages import own_update, trainers
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm

BETA = 0.9
"""The default alpha is this divided by the number of ranks."""


@dataclass(frozen=True, repr=False)
class Elastic(Strategy):
    """Pull parameters and centre towards each other. State: the centre.

    Parameters
    ----------
    period : int
        Steps from one exchange to the next.
    alpha : float
        Fraction of the distance that a rank moves; 0: 0.9 / P.
    pace : str
        ``together``: ranks take their steps together; ``own``: asynchronous (`mpiddl.strategies.gossip.elastic_asynchronous`).
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
            raise UsageError(f"alpha: got {self.alpha}, expected a number from 0 to 1 / P for P ranks (0: 0.9 / P)")

        check_pace(self.pace)

    def __repr__(self) -> str:
        return brief(self, "period")

    def resolve(self, comm: Comm) -> tuple[Strategy, str]:
        return (ElasticOwnPace(self), "") if self.pace == OWN_PACE else (self, "")

    def check(self, size: int) -> None:
        if self.alpha * size > 1:
            raise UsageError(f"alpha: got {self.alpha} on {size} ranks, expected at most 1 / {size}: "
                             "a larger value moves the centre past the mean of the ranks")

    def init(self, comm: Comm, replica: Replica) -> Any:
        return {"centre": replica.params.copy(), "exchanges": 0, "trainers": trainers(comm, replica)}

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        return own_update(grad, state, step, state["trainers"])

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
        """Pull ranks and centre towards each other. Collective."""
        alpha, centre = self.share(state["trainers"]), state["centre"]
        apart = params - centre
        if comm.rank < state["trainers"]:
            params -= alpha * apart
        else:
            apart[:] = 0
        comm.Allreduce(IN_PLACE, apart)
        centre += alpha * apart

    def share(self, size: int) -> float:
        """Alpha if ``size`` ranks hold rows."""
        return self.alpha or BETA / size

    def wants(self, state: Any, params: np.ndarray, step: Step) -> bool:
        """Whether an exchange is wanted after ``step``."""
        return (step.index + 1) % self.period == 0

    def begin(self, state: Any, params: np.ndarray, part: slice) -> None:
        """Called before an asynchronous exchange."""

    def taken(self, state: Any, params: np.ndarray, part: slice, number: int, index: int) -> None:
        """Called after an exchange; ``index`` is the number of finished steps."""
        state["exchanges"] += 1

    def peers(self, number: int, rank: int, size: int) -> list[int]:
        """Ranks that ``rank`` may ask in an asynchronous run: rank 0, which holds the centre."""
        return [0] if rank else []

    def asked(self, state: Any, params: np.ndarray, index: int) -> None:
        """Called when an asynchronous rank has asked; ``index`` is the number of finished steps."""

    def observe(self, state: Any, moved: int, step: Step) -> None:
        """Called after each step of an asynchronous rank, with the number of exchanges in it."""
