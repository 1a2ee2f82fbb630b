"""Adaptive elastic averaging: an exchange takes place when one rank has changed enough since the last one.

`mpiddl.strategies.gossip.triggers` defines "enough".
Cost: every ``period`` steps an all-reduce of 8 bytes, and one of V if a rank wants it. Memory: 3 V.
Source: ours, of `mpiddl.strategies.gossip.elastic` and the trigger of `mpiddl.strategies.gossip.gossip_adaptive`.
Law: theta = 0 is `elastic`, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.strategies.base import Replica, Step
from mpiddl.strategies.gossip.asynchronous import WHOLE
from mpiddl.strategies.gossip.elastic import Elastic
from mpiddl.strategies.gossip.triggers import CHANGE, FIXED, Trigger
from mpiddl.transport.base import IN_PLACE, MAX
from mpiddl.transport.comm import Comm


@dataclass(frozen=True, repr=False)
class ElasticAdaptive(Elastic):
    """`Elastic` that checks the trigger every ``period`` steps. The other parameters are those of `Trigger`."""

    period: int = 1
    theta: float = 0.08
    traffic: float = 0.0
    trigger: str = CHANGE
    threshold: str = FIXED
    silence: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rule.check(self.period)

    def init(self, comm: Comm, replica: Replica) -> Any:
        return {**super().init(comm, replica), **self._rule.state(replica.params, [WHOLE], replica.begun)}

    def mix(self, comm: Comm, state: Any, replica: Replica, step: Step) -> Any:
        if (step.index + 1) % self.period == 0:
            wants = self.wants(state, replica.params, step) and comm.rank < state["trainers"]
            wanted = np.array([wants], np.float64)
            comm.Allreduce(IN_PLACE, wanted, MAX)
            if wanted[0]:
                self.pull(comm, state, replica.params)
                self.taken(state, replica.params, WHOLE, 0, step.index + 1)
            self._rule.calibrate(state, wanted > 0, step.steps, (step.steps - step.index - 1) // self.period)
        return state

    def wants(self, state: Any, params: np.ndarray, step: Step) -> bool:
        return super().wants(state, params, step) and bool(self._rule.wants(state, params, [WHOLE], step)[0])

    def taken(self, state: Any, params: np.ndarray, part: slice, number: int, index: int) -> None:
        super().taken(state, params, part, number, index)
        self._rule.taken(state, params, part, number, index)

    def asked(self, state: Any, params: np.ndarray, index: int) -> None:
        self._rule.taken(state, params, WHOLE, 0, index)

    def observe(self, state: Any, moved: int, step: Step) -> None:
        self._rule.calibrate(state, np.array([moved]), step.steps, step.steps - step.index - 1)

    @property
    def _rule(self) -> Trigger:
        return Trigger(self.theta, self.traffic, self.trigger, self.threshold, self.silence)
