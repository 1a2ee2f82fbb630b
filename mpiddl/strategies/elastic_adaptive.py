"""Adaptive elastic averaging: ranks and centre draw each other as soon as one rank has changed enough since they last did.

When that is, says `mpiddl.strategies.triggers`.
Cost: every ``period`` steps an all-reduce of 8 bytes, and one of V if a rank wants it. Memory: 3 V.
Source: ours, of `mpiddl.strategies.elastic` and the trigger of `mpiddl.strategies.gossip_adaptive`.
Law: theta = 0 is `elastic`, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.strategies.base import Replica, Step
from mpiddl.strategies.elastic import Elastic
from mpiddl.strategies.triggers import CHANGE, FIXED, Trigger
from mpiddl.transport.base import IN_PLACE, MAX, Comm

WHOLE = slice(None)


@dataclass(frozen=True, repr=False)
class ElasticAdaptive(Elastic):
    """`Elastic` that looks every ``period`` steps whether it is wanted: the others are those of `Trigger`."""

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
            wanted = self._rule.wants(state, replica.params, [WHOLE], step).astype(np.float64)
            comm.Allreduce(IN_PLACE, wanted, MAX)
            if wanted[0]:
                self.pull(comm, state, replica.params)
                self._rule.taken(state, replica.params, WHOLE, 0, step.index + 1)
            self._rule.calibrate(state, wanted > 0, step.steps, (step.steps - step.index - 1) // self.period)
        return state

    @property
    def _rule(self) -> Trigger:
        return Trigger(self.theta, self.traffic, self.trigger, self.threshold, self.silence)
