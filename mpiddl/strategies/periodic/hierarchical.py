"""All-reduce of gradients inside each node in every step; average of parameters between nodes every few steps, applied late.

The ranks of a node sum their gradients and take the same steps. Every ``period`` steps all ranks start the average of their
parameters. ``delay`` steps later they apply it: x <- x + (mean - x_0), where x_0 is the rank's contribution to the mean.
Cost: per step, an all-reduce of V bytes in memory; every ``period`` steps 2 (N-1)/N V sent by a node, N nodes, during ``delay``
steps.
Sources: two levels as in hierarchical local SGD, Lin et al., ICLR 2020, arXiv:1808.07217; late averages as in Zhou et al. 2020,
arXiv:2006.00441 (DaSGD). Departures: each sample has the same weight (`mpiddl.strategies.periodic.averages`); each node keeps
its own moments.
Laws: on one node it is `allreduce`, to rounding; with one rank per node and delay 0 it is `local-sgd`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.collectives import allreduce
from mpiddl.node.topology import neighbours
from mpiddl.strategies.base import Combined, Replica, Step, Strategy
from mpiddl.strategies.periodic.averages import Averages, average, holds_rows, own_rate, own_update, trainers
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm
from mpiddl.transport.meter import booked


@dataclass(frozen=True)
class Hierarchical(Strategy):
    """Average over the nodes every ``period`` steps, applied ``delay`` steps later. State: the average in flight."""

    period: int = 8
    delay: int = 1
    replicated = False
    sums = True

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
            return own_update(grad, state, step, trainers(comm, replica))
        found = np.array([float(step.count), float(holds_rows(comm, replica))])
        with booked(comm, "moving"):  # `local` has a meter of its own
            allreduce(local, IN_PLACE, found)
            allreduce(local, IN_PLACE, grad)
        count, ranks = map(int, found)
        alone = local.size == comm.size or not count
        return Combined(grad, count, state, rate=1.0 if alone else own_rate(step, trainers(comm, replica), count, ranks))

    def mix(self, comm: Comm, state: Any, replica: Replica, step: Step) -> Any:
        if neighbours(comm).local.size == comm.size:
            return state
        return self._averages.mix(comm, state, replica, step)

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        self._averages.finish(comm, state, replica)
        if neighbours(comm).local.size < comm.size:
            average(comm, replica.params, replica.trainers)

    @property
    def _averages(self) -> Averages:
        return Averages(self.period, self.delay)
