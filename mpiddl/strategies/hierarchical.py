"""All-reduce inside each node in every step; across nodes parameters are averaged every few steps, and applied late.

The ranks of a node step together on the sum of their gradients. Every ``period`` steps all ranks start the average of their
parameters; ``delay`` steps later what the others have changed is added to what the rank has done meanwhile:
x <- x + (mean - what it gave).
Cost: a step, an all-reduce of V bytes in memory; every ``period`` steps 2 (N-1)/N V sent by a node, N nodes, hidden behind
``delay`` steps.
Sources: two levels as in hierarchical local SGD, Lin et al., ICLR 2020, arXiv:1808.07217; late averages as in Zhou et al. 2020,
arXiv:2006.00441 (DaSGD). Departures: nodes weigh as many as they have ranks; moments stay with their node.
Laws: on one node it is `allreduce`, to rounding; with a rank a node and delay 0 it is `local-sgd`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.collectives import allreduce
from mpiddl.strategies.averages import Averages, average
from mpiddl.strategies.base import Combined, Replica, Step, Strategy
from mpiddl.topology import neighbours
from mpiddl.transport.base import IN_PLACE, Comm


@dataclass(frozen=True)
class Hierarchical(Strategy):
    """Average over the nodes every ``period`` steps, applied ``delay`` steps later. State: the average on its way."""

    period: int = 8
    delay: int = 1
    replicated = False

    def __post_init__(self) -> None:
        Averages(self.period, self.delay)

    def init(self, comm: Comm, replica: Replica) -> Any:
        return {}

    def start(self, comm: Comm, state: Any, grad: np.ndarray, part: slice, step: Step) -> Any:
        self._averages.move_on(comm, grad)
        return state

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        local = neighbours(comm).local
        if local.size == 1:
            return Combined(grad, step.count, state)
        count = np.array([float(step.count)])
        allreduce(local, IN_PLACE, count)
        allreduce(local, IN_PLACE, grad)
        return Combined(grad, int(count[0]), state)

    def mix(self, comm: Comm, state: Any, replica: Replica, step: Step) -> Any:
        if neighbours(comm).local.size == comm.size:
            return state
        return self._averages.mix(comm, state, replica, step)

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        self._averages.finish(comm, state, replica)
        if neighbours(comm).local.size < comm.size:
            average(comm, replica.params)

    @property
    def _averages(self) -> Averages:
        return Averages(self.period, self.delay)
