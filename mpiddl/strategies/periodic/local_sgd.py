"""Local SGD: each rank trains on its own rows; every few steps all ranks take the average of their parameters.

Post-local SGD: the first ``after`` steps are those of `allreduce`. With a ``delay`` the average is started at the end of a
period and applied ``delay`` steps later: x <- x + (mean - x_0), where x_0 is the rank's contribution to the mean. With
``outer`` the change over a period is one step of a slow momentum (`mpiddl.strategies.periodic.slow_momentum`).
Cost: one all-reduce of V bytes every ``period`` steps, so 1/period of synchronous SGD (momentum=average: twice that).
Sources: Stich, ICLR 2019, arXiv:1805.09767, algorithm 1; post-local SGD, Lin et al., ICLR 2020, arXiv:1808.07217; late
averages, Zhou et al. 2020, arXiv:2006.00441 (DaSGD). Interpretation: each sample has the same weight
(`mpiddl.strategies.periodic.averages`).
Laws: period 1 with plain SGD is `allreduce`, to rounding, unless the last batch of an epoch has fewer rows than there are
ranks; so is ``after`` equal to the length of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.strategies.base import Combined, Replica, Step, Strategy, brief
from mpiddl.strategies.periodic.averages import Averages, average, own_update, trainers
from mpiddl.strategies.periodic.slow_momentum import check_outer, slow_state, slow_step
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm

MOMENTUM = ("own", "average", "reset")


@dataclass(frozen=True, repr=False)
class LocalSGD(Strategy):
    """Average the parameters every ``period`` steps, and at the end.

    Parameters
    ----------
    period : int
        Steps from one average to the next.
    delay : int
        Steps from the start of an average to its application; smaller than ``period``.
    after : int
        Steps of synchronous SGD before the first local one.
    momentum : str
        The optimiser's moments at an average: each rank keeps its ``own``, all take the ``average``, or all are ``reset`` to
        zero.
    outer : float
        Factor of the slow momentum, from 0 (none) to below 1.
    """

    period: int = 8
    delay: int = 0
    after: int = 0
    momentum: str = "own"
    outer: float = 0.0
    replicated = False

    def __post_init__(self) -> None:
        Averages(self.period, self.delay)
        object.__setattr__(self, "sums", self.after > 0)
        if self.after < 0:
            raise UsageError(f"after: got {self.after}, expected a number of steps, 0 or more")
        if self.momentum not in MOMENTUM:
            raise UsageError(f"momentum: got {self.momentum!r}, expected one of {', '.join(MOMENTUM)}")
        check_outer(self.outer)
        if self.delay and (self.outer or self.momentum != "own"):
            raise UsageError(f"delay: got {self.delay} with outer > 0 or momentum other than own, expected delay=0")

    def __repr__(self) -> str:
        return brief(self, "period")

    def init(self, comm: Comm, replica: Replica) -> Any:
        return slow_state(replica.params, self.outer)

    def start(self, comm: Comm, state: Any, grad: np.ndarray, part: slice, step: Step) -> Any:
        self._averages.move_on(comm, grad)
        return state

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        if step.index >= self.after:
            return own_update(grad, state, step, trainers(comm, replica))
        comm.Allreduce(IN_PLACE, grad)
        return Combined(grad, step.total, state)

    def mix(self, comm: Comm, state: Any, replica: Replica, step: Step) -> Any:
        if step.index < self.after:
            if self.outer:
                state["began"][:] = replica.params
            return state
        state = self._averages.mix(comm, state, replica, step)
        if self._averages.due(step):
            self._period_over(comm, state, replica)
        return state

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        self._averages.finish(comm, state, replica)
        average(comm, replica.params, replica.trainers)

    def _period_over(self, comm: Comm, state: Any, replica: Replica) -> None:
        for name in sorted(replica.moments):
            if self.momentum == "average":
                average(comm, replica.moments[name], replica.trainers)
            elif self.momentum == "reset":
                replica.moments[name][:] = 0
        slow_step(state, replica.params, self.outer)

    @property
    def _averages(self) -> Averages:
        return Averages(self.period, self.delay)
