"""Gossip: each rank trains on its own rows, and every few steps averages its parameters with its neighbours in a graph.

`mpiddl.strategies.gossip.graphs` defines the neighbours of each round, `mpiddl.strategies.gossip.exchange` the exchange. With
``symmetric``, pairs of ranks average. With ``pull`` and ``push``, each rank receives from one rank and sends to another one.
The two differ only if some ranks skip a round (`mpiddl.strategies.gossip.gossip_adaptive`) or ranks are asynchronous
(`mpiddl.strategies.gossip.asynchronous`). Cost: per round, V bytes sent and V received by a rank, for any number of ranks
(momentum=average: times 1 plus the number of the optimiser's moments); on the complete graph 2(P-1)/P V, or less with ``bits``.
At the end, and every ``average`` steps, an all-reduce of V. Sources: gossiping SGD, Jin et al. 2016, arXiv:1611.04581, section
3; with doubly stochastic weights D-PSGD, Lian et al., NIPS 2017, arXiv:1705.09056, algorithm 1 [interpretation: mixed after the
update, not before it]; momentum that is mixed, Yu et al., ICML 2019, arXiv:1905.03817; slow momentum over gossip, Wang et al.,
ICLR 2020, arXiv:1910.00643 [interpretation: a step of it with each exchange]; periodic averages, Chen et al., ICML 2021,
arXiv:2105.09080, algorithm 1. Interpretation: each sample has the same weight (`mpiddl.strategies.periodic.averages`), and
ranks without rows are not in the graph, unless the user gives the weights. Laws: a round keeps the mean of the ranks'
parameters; on the complete graph with period 1 it is their average by all-reduce, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.strategies.base import Combined, Replica, Step, Strategy, brief, check_numbers
from mpiddl.strategies.gossip.asynchronous import OWN_PACE, TOGETHER, WHOLE, OwnPace, check_pace
from mpiddl.strategies.gossip.exchange import blend
from mpiddl.strategies.gossip.graphs import (
    COMPLETE,
    DIRECTIONS,
    EXPONENTIAL,
    PUSH,
    SYMMETRIC,
    Hood,
    check,
    check_name,
    everybody,
    hood,
    rounds_of,
    weights,
)
from mpiddl.strategies.gossip.quantised_average import (
    check_bits,
    few_bits_average,
    few_bits_state,
    few_bits_taken,
    few_bits_warm,
)
from mpiddl.strategies.periodic.averages import average, own_update, trainers
from mpiddl.strategies.periodic.slow_momentum import check_outer, slow_begin, slow_end, slow_state
from mpiddl.transport.comm import Comm

OWN, AVERAGE = MOMENTUM = "own", "average"


@dataclass(frozen=True, repr=False)
class Gossip(Strategy):
    """Mix parameters with other ranks every ``period`` steps; at the end all take the mean.

    Parameters
    ----------
    graph : str or array_like
        ring, exponential, matching, complete, or mixing matrices, shape (rounds, P, P) or (P, P).
    direction : str
        symmetric, pull or push.
    period : int
        Steps from one round to the next.
    momentum : str
        The optimiser's moments: each rank keeps its ``own``, or they are mixed like the parameters (``average``).
    outer : float
        Factor of the slow momentum, from 0 (none) to below 1. It makes a step after each exchange.
    average : int
        Steps from one average of all ranks to the next; 0: only at the end.
    seed : int
        Seed of the graph's random orders.
    pace : str
        ``together``: ranks take their steps together; ``own``: asynchronous.
    bits : int
        8, 4 or 2: bits per number that averages are sent in (`mpiddl.strategies.gossip.quantised_average`); 0: all bits.
    """

    graph: Any = EXPONENTIAL
    direction: str = SYMMETRIC
    period: int = 1
    momentum: str = OWN
    outer: float = 0.0
    average: int = 0
    seed: int = 0
    pace: str = TOGETHER
    bits: int = 0
    replicated = False

    def __post_init__(self) -> None:
        check_numbers(self)
        if isinstance(self.graph, str):
            check_name(self.graph)
        else:  # plain numbers, so that it is printed and compared like any other parameter
            object.__setattr__(self, "graph", _nested(rounds_of(self.graph).tolist()))
        check_pace(self.pace)
        for name, known in (("direction", DIRECTIONS), ("momentum", MOMENTUM)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name}: got {getattr(self, name)!r}, expected one of {', '.join(known)}")
        for name, least in (("period", 1), ("average", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}: got {getattr(self, name)}, expected {least} or more")
        check_outer(self.outer)
        if self.pace == OWN_PACE and (self.average or self.momentum != OWN):
            raise UsageError("pace: got own with average > 0 or momentum=average, expected pace=together")
        check_bits(self.bits)
        wanted = {"graph": COMPLETE, "direction": SYMMETRIC, "momentum": OWN, "pace": TOGETHER}
        other = [name for name, value in wanted.items() if getattr(self, name) != value]
        if self.bits and other:
            named = getattr(self, other[0]) if isinstance(getattr(self, other[0]), str) else "weights"
            raise UsageError(f"bits: got {self.bits} with {other[0]}={named}, expected {other[0]}={wanted[other[0]]} or bits=0")

    def __repr__(self) -> str:
        return brief(self, "graph")

    def resolve(self, comm: Comm) -> tuple[Strategy, str]:
        return (OwnPace(self), "") if self.pace == OWN_PACE else (self, "")

    def check(self, size: int) -> None:
        check(self.graph, size, self.symmetric)

    def warm(self, size: int, dtype: np.dtype) -> None:
        few_bits_warm(size, dtype, self.bits)

    def init(self, comm: Comm, replica: Replica) -> Any:
        begin = {**slow_state(replica.params, self.outer), **few_bits_state(comm, replica.params, self.bits)}
        return {"exchanges": 0, "trainers": self.trainers(comm, replica), **begin}

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        return own_update(grad, state, step, state["trainers"])

    def mix(self, comm: Comm, state: Any, replica: Replica, step: Step) -> Any:
        done, number = step.index + 1, self.rounds(step.index, step.steps)
        if self.average and done % self.average == 0:
            self.meet(comm, state, replica, step)
        elif self.rounds(done, step.steps) > number:
            self.round(comm, state, replica, self.near(comm, state, number), step)
        return state

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        model = self.model(comm, state, replica.params)
        if model is None:
            average(comm, replica.params, state["trainers"])
        else:
            replica.params[:] = model

    def figures(self, comm: Comm, state: Any, replica: Replica) -> dict[str, Any]:
        return {"exchanges": state["exchanges"]}

    @property
    def symmetric(self) -> bool:
        return self.direction == SYMMETRIC

    def trainers(self, comm: Comm, replica: Replica) -> int:
        """Number of ranks in the graph, the first ones: those that hold rows, or all ranks if the user gives the weights."""
        return trainers(comm, replica) if isinstance(self.graph, str) else comm.size

    def near(self, comm: Comm, state: Any, number: int) -> Hood:
        """This rank's part of round ``number``."""
        mixing = weights(self.graph, state["trainers"], number, self.symmetric, self.seed)
        found = hood(mixing, min(comm.rank, len(mixing) - 1), self.symmetric)
        return found if comm.rank < len(mixing) or found.uniform else Hood(1.0, {}, {})

    def rounds(self, done: int, steps: int) -> int:
        """Number of rounds in the first ``done`` of ``steps`` steps."""
        return done // self.period

    def round(self, comm: Comm, state: Any, replica: Replica, near: Hood, step: Step) -> None:
        """The round after ``step``, with all ranks."""
        self.exchange(comm, state, replica, near, WHOLE)
        self.taken(state, replica.params, WHOLE, 0, step.index + 1)

    def meet(self, comm: Comm, state: Any, replica: Replica, step: Step) -> None:
        """All ranks take the mean after ``step``."""
        self.round(comm, state, replica, everybody(state["trainers"]), step)

    def exchange(self, comm: Comm, state: Any, replica: Replica, near: Hood, part: slice) -> None:
        """Mix ``part`` with the neighbours of this rank. `taken` follows."""
        if not near.uniform:
            self.begin(state, replica.params, part)
        if self.bits:
            few_bits_average(comm, state, replica.params, self.bits, state["trainers"])
        else:
            self.blend(comm, replica, near, part)
        if near.uniform:
            self.begin(state, replica.params, part)

    def blend(self, comm: Comm, replica: Replica, near: Hood, part: slice) -> None:
        """Mix ``part`` of the parameters, and of the moments with momentum=average."""
        mixed = sorted(replica.moments) if self.momentum == AVERAGE else []
        for array in (replica.params, *(replica.moments[name] for name in mixed)):
            blend(comm, array[part], near)

    def begin(self, state: Any, params: np.ndarray, part: slice) -> None:
        """Called before an exchange of a part."""
        slow_begin(state, params, self.outer, part)

    def taken(self, state: Any, params: np.ndarray, part: slice, number: int, index: int) -> None:
        """Called after an exchange of a part; ``index`` is the number of finished steps."""
        state["exchanges"] += 1
        slow_end(state, params, self.outer, part)
        few_bits_taken(state, params)

    def wants(self, state: Any, params: np.ndarray, step: Step) -> bool:
        """Whether an asynchronous rank wants an exchange after ``step``."""
        return self.rounds(step.index + 1, step.steps) > self.rounds(step.index, step.steps)

    def peers(self, number: int, rank: int, size: int) -> list[int]:
        """Ranks that the asynchronous ``rank`` may ask at its ``number``-th request, in this order."""
        symmetric = self.symmetric and self.graph != COMPLETE
        near = hood(weights(self.graph, size, number, symmetric, self.seed), rank, False)
        peers = sorted(near.targets if self.direction == PUSH else near.sources)
        first = number % max(len(peers), 1)
        return peers[first:] + peers[:first]

    def asked(self, state: Any, params: np.ndarray, index: int) -> None:
        """Called when an asynchronous rank has asked; ``index`` is the number of finished steps."""

    def observe(self, state: Any, moved: int, step: Step) -> None:
        """Called after each step of an asynchronous rank, with the number of exchanges in it."""


def _nested(numbers: Any) -> Any:
    return tuple(map(_nested, numbers)) if isinstance(numbers, list) else numbers
