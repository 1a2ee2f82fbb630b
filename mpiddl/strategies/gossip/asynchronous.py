"""Asynchronous gossip: ranks never wait for each other's computation.

A rank that wants an exchange asks the next rank of its graph, sends its data and continues. It applies the answer after the
step during which the answer arrives. The other rank answers between two steps of its own. A rank that has not answered yet is
skipped, so that slow or absent ranks do not delay the others. A rank that has finished keeps answering requests until every
rank has finished.

===========  ===========  ========================  =======================================================
direction    sent         answered                  change of the parameters
===========  ===========  ========================  =======================================================
symmetric    x_i, k_i     d = (x_i - x_j) / 2k      x_j += d; later, x_i -= d
pull         nothing      x_j                       x_i += (x_j - z) / 2, z halfway between x_i when it asked and now
push         x_i, half    acknowledgement           x_j <- (w_j x_j + w x_i) / (w_j + w); then w_j <- w_j + w
             its weight
===========  ===========  ========================  =======================================================

k is 1 plus the number of other exchanges of the two ranks in flight, as far as each rank knows. Without this factor, late
differences would add up: ranks would correct the same distance several times and drift apart.

Laws: for any order of messages, a completed symmetric exchange keeps the mean, and a completed push the weighted mean. At a
meeting of all ranks (`Step.meet`), no messages are in flight. After a rank has left for good, there are no more meetings.
Cost: per exchange, V bytes and V back (symmetric), or V (pull, push); at a meeting and at the end, some empty messages and an
all-reduce of V.
Memory: V for each rank that is asked, on both sides while the exchange is in flight.
Sources: AD-PSGD, Lian et al., ICML 2018, arXiv:1710.06952, algorithm 1 [departure: there the asking rank waits for the answer,
and graphs are bipartite to avoid deadlocks; here it continues, and applies the difference that the exchange has made]; GoSGD,
Blot et al. 2016, arXiv:1611.09726, for push; the weights of a symmetric exchange and of a pull, for any weights of the graph,
are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.strategies.base import Combined, Replica, Step, Strategy
from mpiddl.strategies.gossip.graphs import PULL, PUSH, SYMMETRIC
from mpiddl.strategies.gossip.mailbox import Letter, Mailbox
from mpiddl.strategies.periodic.averages import average, own_rate
from mpiddl.transport.comm import Comm
from mpiddl.transport.meter import booked

ASK, ANSWER, WEIGHT, HERE, ALL, NONE, DONE = range(1, 8)
"""Tags. ASK and ANSWER: an exchange; WEIGHT: the weight of the asking rank. To rank 0: HERE, this rank waits for a meeting;
from rank 0: ALL, all ranks meet; NONE, there is no meeting. To all: DONE, this rank makes no more requests."""

WHOLE = slice(None)

TOGETHER, OWN_PACE = PACES = "together", "own"


def check_pace(pace: str) -> None:
    """Raise a `UsageError` for a name that is none of `PACES`."""
    if pace not in PACES:
        raise UsageError(f"pace: got {pace!r}, expected {' or '.join(PACES)}")


class Rounds:
    """The exchanges of a rank in flight. At a meeting there are none, so checkpoints need not save them.

    state, params : the strategy's current state, and the rank's current parameters.
    """

    state: Any
    params: np.ndarray

    def __init__(self, comm: Comm, rule: Any):
        self._comm, self._rule = comm, rule
        self._mail = Mailbox(comm, self._room)
        self._given: dict[int, np.ndarray] = {}  # by asked rank: the parameters at the time of asking
        self._weights: dict[int, float] = {}  # by asking rank: the weight it sends, or its exchanges in flight
        self._here: list[int] = []
        self._done: set[int] = set()
        self._word = 0

    def serve(self) -> None:
        """Process all messages that have arrived."""
        for letter in self._mail.letters():
            if letter.tag == ASK:
                self._answer(letter)
            elif letter.tag == ANSWER:
                self._answered(letter)
            elif letter.tag == WEIGHT:
                self._weights[letter.source] = float(letter.array[0])
            elif letter.tag == HERE:
                self._here.append(letter.source)
            elif letter.tag == DONE:
                self._done.add(letter.source)
            else:
                self._word = letter.tag
        self._decide()

    def ask(self) -> bool:
        """Start an exchange with the next rank that this rank waits for no answer from. Returns whether there is one."""
        number, self.state["asked"] = self.state["asked"], self.state["asked"] + 1
        peers = self._rule.peers(number, self._comm.rank, self.state["trainers"])
        free = [peer for peer in peers if peer not in self._given]
        if free:
            self._ask(free[0])
        return bool(free)

    def meet(self) -> bool:
        """Wait for a meeting. Returns True if all ranks have arrived, False if a rank has left for good."""
        self._until(self._settled)
        self._word = 0
        if self._comm.rank == 0:
            self._here.append(0)
        else:
            self._mail.send(self.params[:0], 0, HERE)
        self._until(lambda: self._word > 0)
        return self._word == ALL

    def end(self) -> None:
        """Answer requests until every rank has finished."""
        self._until(self._settled)
        self._done.add(self._comm.rank)
        for other in range(self._comm.size):
            if other != self._comm.rank:
                self._mail.send(self.params[:0], other, DONE)
        self._until(lambda: len(self._done) == self._comm.size and self._mail.empty)
        self._done.clear()  # in a later run on these ranks, no rank asks before all have arrived

    def _ask(self, peer: int) -> None:
        given = self.params.copy()
        if self._rule.direction == PUSH:
            self.state["weights"] *= 0.5
            self._mail.send(self.state["weights"].copy(), peer, WEIGHT)
        elif self._rule.direction == SYMMETRIC:
            self._mail.send(np.array([1.0 + len(self._given)]), peer, WEIGHT)
        self._given[peer] = given
        self._mail.send(given[:0] if self._rule.direction == PULL else given, peer, ASK)
        self._rule.asked(self.state, self.params, self.state["done"])

    def _answer(self, asked: Letter) -> None:
        params = self.params
        if self._rule.direction != PULL:
            self._rule.begin(self.state, params, WHOLE)
        if self._rule.direction == PUSH:
            theirs, mine = self._weights.pop(asked.source), float(self.state["weights"][0])
            self.state["weights"][0] = mine + theirs
            self._mail.send(params[:0], asked.source, ANSWER)
            params *= mine / (mine + theirs)
            params += asked.array * params.dtype.type(theirs / (mine + theirs))
        elif self._rule.direction == PULL:
            self._mail.send(params.copy(), asked.source, ANSWER)
        else:
            change = asked.array
            change -= params
            change *= 0.5 / (self._weights.pop(asked.source) + len(self._given))
            params += change
            self._mail.send(-change, asked.source, ANSWER)
        if self._rule.direction != PULL:
            self._taken()

    def _answered(self, answer: Letter) -> None:
        given, change = self._given.pop(answer.source), answer.array
        if self._rule.direction == PULL:  # the answer is, on average, from halfway: waiting must not undo steps
            given += self.params
            given *= 0.5
            change -= given
            change *= 0.5
        if self._rule.direction != PUSH:
            self._rule.begin(self.state, self.params, WHOLE)
            self.params += change
            self._taken()

    def _taken(self) -> None:
        self._rule.taken(self.state, self.params, WHOLE, 0, self.state["done"])

    def _decide(self) -> None:
        """On rank 0: once decided, tell the waiting ranks whether they meet."""
        word = ALL if len(self._here) == self._comm.size else NONE if self._done else 0
        if word and self._here:
            for rank in self._here:
                if rank != self._comm.rank:
                    self._mail.send(self.params[:0], rank, word)
            self._word = word
            self._here = []

    def _settled(self) -> bool:
        """No exchange started by this rank is in flight."""
        return not self._given and self._mail.empty

    def _until(self, over: Callable[[], bool]) -> None:
        with booked(self._comm, "waiting"):
            self.serve()
            while not over():
                self._mail.rest()
                self.serve()

    def _room(self, tag: int) -> np.ndarray:
        """An array for a message with ``tag``."""
        if tag == WEIGHT:
            return np.empty(1)
        filled = (tag == ASK and self._rule.direction != PULL) or (tag == ANSWER and self._rule.direction != PUSH)
        return np.empty_like(self.params if filled else self.params[:0])


@dataclass(frozen=True)
class OwnPace(Strategy):
    """Asynchronous gossip. ``rule``, a `mpiddl.strategies.Gossip`, selects the partner and the time of each exchange."""

    rule: Any
    kind: ClassVar[type[Rounds]] = Rounds
    replicated = False
    lockstep = False

    def check(self, size: int) -> None:
        self.rule.check(size)

    def init(self, comm: Comm, replica: Replica) -> Any:
        return {**self.rule.init(comm, replica), "asked": 0, "done": 0, "weights": np.ones(1)}

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        rounds, before = self._rounds(comm, state, replica), state["exchanges"]
        if step.count:
            rate = step.rate * own_rate(step, state["trainers"], step.count)
            replica.apply(replica.params, grad, replica.moments, rate, 1 / step.count, replica.updates)
        state["done"] = step.index + 1
        with booked(comm, "moving"):
            rounds.serve()
            asked = comm.rank < state["trainers"] and self.rule.wants(state, replica.params, step) and rounds.ask()
        self.rule.observe(state, int(asked) if self.rule.direction == PUSH else state["exchanges"] - before, step)
        meet = bool(step.meet) and state["done"] % step.meet == 0 and state["done"] < step.steps and rounds.meet()
        return Combined(grad, 0, state, updates=int(step.count > 0), meet=meet)

    def model(self, comm: Comm, state: Any, params: np.ndarray) -> np.ndarray:
        """The weighted mean; the weights of the ranks in the graph add up to their number."""
        mean = params * params.dtype.type(state["weights"][0])
        average(comm, mean, state["trainers"])
        return mean

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        self._rounds(comm, state, replica).end()
        replica.params[:] = self.model(comm, state, replica.params)

    def figures(self, comm: Comm, state: Any, replica: Replica) -> dict[str, Any]:
        return self.rule.figures(comm, state, replica)

    def _rounds(self, comm: Comm, state: Any, replica: Replica) -> Rounds:
        """The exchanges in flight; created at the first step, also of a resumed run."""
        rounds: Rounds = comm.kept((self, "rounds"), lambda: self.kind(comm, self.rule))
        rounds.state, rounds.params = state, replica.params
        return rounds
