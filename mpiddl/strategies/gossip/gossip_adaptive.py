"""Adaptive gossip: two ranks exchange when one of them has changed enough since its last exchange.

The neighbours of a round first tell each other, in 8 bytes, whether they want an exchange. No rank waits for a message that
does not come. The exchange takes place if one of the two wants it (``symmetric``), if the receiving rank wants it (``pull``),
or if the sending rank wants it (``push``). With ``push`` each rank has a weight and sends half of it with its parameters, which
keeps the weighted mean. `mpiddl.strategies.gossip.triggers` decides when a rank wants an exchange. On the complete graph all
ranks exchange if one wants to. Cost: per round, 8 bytes for each part and neighbour, and V if there is an exchange. Memory: V.
Sources: Ho, Wu and Liu, CCGRID 2018 [interpretation: the trigger, its symmetry, and the partners]; a trigger for each tensor,
EventGraD, Ghosh and Gupta, MLHPC 2020 [interpretation: without an exchange the neighbour is left out of the average; there its
last known value is used]; weights sent with the parameters, Kempe et al., FOCS 2003, and Blot et al. 2016, arXiv:1611.09726
(GoSGD). Laws: theta = 0 is `gossip`, bit for bit; a symmetric round keeps the mean, a push round the weighted mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.strategies.base import Replica, Step
from mpiddl.strategies.gossip.asynchronous import OWN_PACE, WHOLE
from mpiddl.strategies.gossip.exchange import tell
from mpiddl.strategies.gossip.gossip import Gossip
from mpiddl.strategies.gossip.graphs import PULL, PUSH, Hood, everybody
from mpiddl.strategies.gossip.triggers import CHANGE, FIXED, Trigger
from mpiddl.strategies.periodic.averages import average
from mpiddl.transport.base import IN_PLACE, MAX
from mpiddl.transport.comm import Comm


@dataclass(frozen=True, repr=False)
class GossipAdaptive(Gossip):
    """`Gossip` that skips rounds in which no rank has changed enough.

    Parameters
    ----------
    theta, traffic, trigger, threshold, silence
        See `mpiddl.strategies.gossip.triggers.Trigger`.
    tensors : int
        1: each tensor of the model has its own trigger.
    """

    theta: float = 0.08
    traffic: float = 0.0
    trigger: str = CHANGE
    threshold: str = FIXED
    silence: int = 0
    tensors: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._trigger.check(self.period)
        if self.tensors not in (0, 1):
            raise UsageError(f"tensors: got {self.tensors}, expected 0 (one trigger for the model) or 1 (one per tensor)")
        if self.tensors and self.pace == OWN_PACE:
            raise UsageError("pace: got own with tensors=1, expected pace=together or tensors=0")
        if self.tensors and self.bits:
            raise UsageError(f"bits: got {self.bits} with tensors=1, expected bits=0 or tensors=0")

    def init(self, comm: Comm, replica: Replica) -> Any:
        parts = replica.tensors if self.tensors else [slice(0, replica.params.size)]
        bounds = [[part.start, part.stop] for part in parts]
        return {**super().init(comm, replica), **self._trigger.state(replica.params, parts, replica.begun), "parts": bounds,
                "weights": np.ones(len(parts))}

    def round(self, comm: Comm, state: Any, replica: Replica, near: Hood, step: Step) -> None:
        parts = _parts(state)
        wanted = self._trigger.wants(state, replica.params, parts, step) & (comm.rank < state["trainers"])
        moved = np.zeros(len(parts), bool)
        for number, left in enumerate(self._agreed(comm, state, near, wanted)):
            if left is not None:
                moved[number] = left.uniform or left.sources or wanted[number]  # a rank that only sent has received nothing
                if moved[number]:
                    self.exchange(comm, state, replica, left, parts[number])
                else:
                    self.blend(comm, replica, left, parts[number])
        for number in np.flatnonzero(moved).tolist():
            self.taken(state, replica.params, parts[number], number, step.index + 1)
        to_come = self.rounds(step.steps, step.steps) - self.rounds(step.index + 1, step.steps)
        self._trigger.calibrate(state, moved, step.steps, to_come)

    def meet(self, comm: Comm, state: Any, replica: Replica, step: Step) -> None:
        _weigh(replica.params, state)
        state["weights"][:] = 1
        self.exchange(comm, state, replica, everybody(state["trainers"]), WHOLE)
        for number, part in enumerate(_parts(state)):
            self.taken(state, replica.params, part, number, step.index + 1)

    def taken(self, state: Any, params: np.ndarray, part: slice, number: int, index: int) -> None:
        super().taken(state, params, part, number, index)
        self._trigger.taken(state, params, part, number, index)

    def wants(self, state: Any, params: np.ndarray, step: Step) -> bool:
        return super().wants(state, params, step) and bool(self._trigger.wants(state, params, _parts(state), step)[0])

    def asked(self, state: Any, params: np.ndarray, index: int) -> None:
        self._trigger.taken(state, params, WHOLE, 0, index)

    def observe(self, state: Any, moved: int, step: Step) -> None:
        self._trigger.calibrate(state, np.array([moved]), step.steps, step.steps - step.index - 1)

    def model(self, comm: Comm, state: Any, params: np.ndarray) -> np.ndarray:
        """The weighted mean; the weights of the ranks in the graph add up to their number."""
        mean = params.copy()
        _weigh(mean, state)
        average(comm, mean, state["trainers"])
        return mean

    @property
    def _trigger(self) -> Trigger:
        return Trigger(self.theta, self.traffic, self.trigger, self.threshold, self.silence)

    def _agreed(self, comm: Comm, state: Any, near: Hood, wanted: np.ndarray) -> list[Hood | None]:
        """For each part, the exchanges of this round that this rank and its neighbours want."""
        if near.uniform:
            told = wanted.astype(np.float64)
            comm.Allreduce(IN_PLACE, told, MAX)
            return [near if somebody else None for somebody in told.tolist()]
        theirs = tell(comm, wanted * state["weights"], near)
        return [self._left(state, near, number, mine, {rank: float(words[number]) for rank, words in theirs.items()})
                for number, mine in enumerate(wanted.tolist())]

    def _left(self, state: Any, near: Hood, number: int, wanted: bool, theirs: dict[int, float]) -> Hood | None:
        """The exchanges of part ``number``, or None. ``theirs``: weights of the ranks that want an exchange, 0 for others."""
        hears = {rank: weight for rank, weight in near.sources.items() if self._goes(wanted, theirs[rank] > 0)}
        heard = {rank: weight for rank, weight in near.targets.items() if self._goes(theirs[rank] > 0, wanted)}
        if not hears and not heard:
            return None
        whole = hears == near.sources and heard == near.targets  # keep the weights: a recomputed sum may miss 1
        own = near.own if whole else 1 - sum((heard if self.direction == PUSH else hears).values())
        if self.direction != PUSH:
            return Hood(own, hears, heard)
        mine = own * state["weights"][number]
        all = mine + sum(weight * theirs[rank] for rank, weight in hears.items())
        state["weights"][number] = all
        return Hood(mine / all, {rank: weight * theirs[rank] / all for rank, weight in hears.items()}, heard)

    def _goes(self, hearer: bool, heard: bool) -> bool:
        """Whether parameters are sent, given the wishes of the receiving and the sending rank."""
        return heard if self.direction == PUSH else hearer if self.direction == PULL else hearer or heard


def _parts(state: Any) -> list[slice]:
    return [slice(*bounds) for bounds in state["parts"]]


def _weigh(params: np.ndarray, state: Any) -> None:
    """Multiply each part by its weight."""
    for part, weight in zip(_parts(state), state["weights"].tolist(), strict=True):
        params[part] *= weight
