"""Gossip of ranks that take their steps each at its own pace: nobody waits for anybody's computing.

Who wants an exchange asks the next of the ranks that its graph gives it, sends what there is to send and goes on; the answer
is taken after whatever step it has come by. The other one answers between two steps of its own. A rank that has not answered
yet is passed over, so that a slow one, or one that is gone for a while, holds up nobody. A rank that is done goes on
answering until all are.

===========  ===========  ========================  =======================================================
direction    what is sent what is answered          what becomes of the parameters
===========  ===========  ========================  =======================================================
symmetric    x_i, k_i     d = (x_i - x_j) / 2k      x_j += d; later, x_i -= d
pull         nothing      x_j                       x_i += (x_j - z) / 2, z halfway between x_i when it asked and now
push         x_i, half    that it has come          x_j <- (w_j x_j + w x_i) / (w_j + w); then w_j <- w_j + w
             its weight
===========  ===========  ========================  =======================================================

k is 1 and what the two have under way beside this exchange, as far as either knows: differences that are taken late would else
add up, and ranks that correct the same distance several times drive each other apart.

Laws: whatever the order in which messages come, a symmetric exchange does not change the mean once it is over, a push not the
weighted mean; where all meet (`Step.meet`), nothing is on its way. A rank that has left for good is done; nobody meets from
then on.
Cost: an exchange, V bytes and V back (symmetric), V (pull, push); at a meeting and at the end, some empty messages and an
all-reduce of V.
Memory: V for each rank that is asked; on both ends while it is on its way.
Sources: AD-PSGD, Lian et al., ICML 2018, arXiv:1710.06952, algorithm 1 [departure: there one who asks waits for the answer,
and graphs are bipartite lest ranks wait for each other; here it goes on, and takes the difference that the exchange has
made]; GoSGD, Blot et al. 2016, arXiv:1611.09726, for push; the weights of a symmetric exchange and of a pull, whatever the
graph's, are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.strategies.averages import average
from mpiddl.strategies.base import Combined, Replica, Step, Strategy
from mpiddl.strategies.graphs import PULL, PUSH, SYMMETRIC
from mpiddl.strategies.mailbox import Letter, Mailbox
from mpiddl.transport.base import Comm

ASK, ANSWER, WEIGHT, HERE, ALL, NONE, DONE = range(1, 8)
"""Tags. An exchange is asked for, and answered; the weight of what is asked with. To rank 0: this rank waits to meet; from it:
all meet, nobody does. To all: this rank asks no more."""

WHOLE = slice(None)

TOGETHER, OWN_PACE = PACES = "together", "own"


def check_pace(pace: str) -> None:
    """Raise a `UsageError` for a name that is none of `PACES`."""
    if pace not in PACES:
        raise UsageError(f"pace: got {pace!r}, expected {', '.join(PACES)}")


class Rounds:
    """What a rank has under way: nothing of it is left where all meet, so that no checkpoint holds it.

    state, params : the strategy's, and the rank's, as they are now.
    """

    state: Any
    params: np.ndarray

    def __init__(self, comm: Any, rule: Any):
        self._comm, self._rule = comm, rule
        self._mail = Mailbox(comm, self._room)
        self._given: dict[int, np.ndarray] = {}  # by who has been asked: the parameters as they were then
        self._weights: dict[int, float] = {}  # by who asks: of what it sends, or how many exchanges it has under way
        self._here: list[int] = []
        self._done: set[int] = set()
        self._word = 0

    def serve(self) -> None:
        """See to all that has come."""
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
        """Begin an exchange with the next rank that has none under way with this one, if there is one."""
        number, self.state["asked"] = self.state["asked"], self.state["asked"] + 1
        peers = self._rule.peers(number, self._comm.rank, self._comm.size)
        free = [peer for peer in peers if peer not in self._given]
        if free:
            self._ask(free[0])
        return bool(free)

    def meet(self) -> bool:
        """Wait for the others; whether all have come, with nothing on its way, and not somebody has left for good."""
        self._until(self._settled)
        self._word = 0
        if self._comm.rank == 0:
            self._here.append(0)
        else:
            self._mail.send(self.params[:0], 0, HERE)
        self._until(lambda: self._word > 0)
        return self._word == ALL

    def end(self) -> None:
        """Answer whoever asks, until nobody does any more."""
        self._until(self._settled)
        self._done.add(self._comm.rank)
        for other in range(self._comm.size):
            if other != self._comm.rank:
                self._mail.send(self.params[:0], other, DONE)
        self._until(lambda: len(self._done) == self._comm.size and self._mail.empty)
        self._done.clear()  # of another run on these ranks nobody asks before all are here

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
        if self._rule.direction == PULL:  # what has come is, on average, of halfway: a rank takes no step back for waiting
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
        """On rank 0: let those that wait to meet know whether they do, once that is known."""
        word = ALL if len(self._here) == self._comm.size else NONE if self._done else 0
        if word and self._here:
            for rank in self._here:
                if rank != self._comm.rank:
                    self._mail.send(self.params[:0], rank, word)
            self._word = word
            self._here = []

    def _settled(self) -> bool:
        """Nothing that this rank has begun is under way."""
        return not self._given and self._mail.empty

    def _until(self, over: Callable[[], bool]) -> None:
        entered = self._comm.now()
        self.serve()
        while not over():
            self._mail.rest()
            self.serve()
        self._comm.meter.waiting += self._comm.now() - entered

    def _room(self, tag: int) -> np.ndarray:
        """For a message under ``tag``."""
        if tag == WEIGHT:
            return np.empty(1)
        filled = (tag == ASK and self._rule.direction != PULL) or (tag == ANSWER and self._rule.direction != PUSH)
        return np.empty_like(self.params if filled else self.params[:0])


@dataclass(frozen=True)
class OwnPace(Strategy):
    """Gossip by ``rule``, a `mpiddl.strategies.Gossip`, which says with whom a rank exchanges, and when."""

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
            replica.apply(replica.params, grad, replica.moments, step.rate, 1 / step.count, replica.updates)
        state["done"] = step.index + 1
        rounds.serve()
        asked = self.rule.wants(state, replica.params, step) and rounds.ask()
        self.rule.observe(state, int(asked) if self.rule.direction == PUSH else state["exchanges"] - before, step)
        meet = bool(step.meet) and state["done"] % step.meet == 0 and state["done"] < step.steps and rounds.meet()
        return Combined(grad, 0, state, updates=int(step.count > 0), meet=meet)

    def model(self, comm: Comm, state: Any, params: np.ndarray) -> np.ndarray:
        """The weighted mean; the weights of all ranks add up to their number."""
        mean = params * params.dtype.type(state["weights"][0])
        average(comm, mean)
        return mean

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        self._rounds(comm, state, replica).end()
        replica.params[:] = self.model(comm, state, replica.params)

    def figures(self, comm: Comm, state: Any, replica: Replica) -> dict[str, Any]:
        return self.rule.figures(comm, state, replica)

    def _rounds(self, comm: Any, state: Any, replica: Replica) -> Rounds:
        """Made by the first step, of a run that is continued, too."""
        rounds: Rounds = comm.kept((self, "rounds"), lambda: self.kind(comm, self.rule))
        rounds.state, rounds.params = state, replica.params
        return rounds
