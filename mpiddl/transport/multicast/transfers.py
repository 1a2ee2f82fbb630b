"""Transfers under way: what this rank knows of one that it sends, and of one that comes to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

QUIET_S = 0.005
"""Without news of a transfer, until its sender asks the receivers what they have; the pause doubles each time."""

LAGGING_S = 0.1
"""Without a word of a receiver, until its sender no longer waits for it; more where news take long."""

LONGEST_PAUSE_S = 0.5
"""Between two questions."""


@dataclass
class Pace:
    """How fast the receivers of a stream answer, as far as its sender knows.

    answer : seconds from sending datagrams until all receivers have acknowledged them.
    pause : seconds without news, until receivers are asked.
    """

    answer: float = 0.0
    pause: float = QUIET_S

    def learn(self, seconds: float) -> None:
        """An acknowledgement came after so long, without a question."""
        self.answer = self.answer + 0.25 * (seconds - self.answer) if self.answer else seconds
        self.pause = min(max(QUIET_S, 2 * self.answer), LONGEST_PAUSE_S)

    def asked_early(self) -> None:
        """A receiver that was asked had no news, or was asked again before its answer came."""
        self.pause = max(min(2 * self.pause, LAGGING_S), self.pause)


@dataclass
class Outgoing:
    """A transfer that this rank sends.

    round, owner : which one. The owner is another rank if this one sends in its place.
    count, nbytes : its datagrams, and bytes.
    got : by receiver, datagrams that it has.
    windows : by receiver, datagrams that may be under way to it.
    put : this rank has the data; else it only knows that another rank sends in its place.
    next : the datagrams before this one have been sent.
    sent : when the last of them was.
    deadline, pause : when receivers are asked what they have, and the seconds until then.
    pace, asked : of the stream; how often receivers were asked since one has answered.
    timed : a number of datagrams, and when so many had been sent; their acknowledgement is still to come.
    """

    round: int
    owner: int
    got: dict[int, int]
    pace: Pace
    count: int = 0
    nbytes: int = 0
    windows: dict[int, int] = field(default_factory=dict)
    put: bool = False
    next: int = 0
    sent: float | None = None
    deadline: float = inf
    pause: float = QUIET_S
    asked: int = 0
    timed: tuple[int, float] | None = None

    def wait_for_news(self, now: float) -> None:
        """Something has happened: be patient from now on."""
        self.pause = self.pace.pause
        self.deadline = now + self.pause

    def was_sent(self, number: int, now: float) -> None:
        """So many more datagrams."""
        self.timed = self.timed or (self.next + number, now)
        if self.deadline == inf or self.next + number == self.count:
            self.wait_for_news(now)
        self.next += number

    def ask(self, now: float) -> None:
        """Receivers are asked now, and again after twice the pause."""
        self.asked, self.timed = self.asked + 1, None
        self.pause = min(2 * self.pause, LONGEST_PAUSE_S)
        self.deadline = now + self.pause

    def hear(self, rank: int, got: int, now: float) -> None:
        """What a receiver says that it has."""
        if self.asked > (got > self.got[rank]):
            self.pace.asked_early()
        if got > self.got[rank]:
            self.got[rank] = got
            if self.timed is not None and min(self.got.values()) >= self.timed[0]:
                self.pace.learn(now - self.timed[1])
                self.timed = None
            if self.put and self.next:
                self.wait_for_news(now)
        self.asked = 0


@dataclass
class Incoming:
    """A transfer that has begun to come.

    fresh : when this rank asks for datagrams that it has not asked for yet; ``asked`` is the end of those that it has.
    retry : when it asks again for those before ``retried``; ``attempts``: how often it has, since some came that it had not
        ``seen``.
    since : when it asked last.
    acknowledged, window : what its senders were told: datagrams that are here, and that may be under way; 0: nothing yet.
    sources : the ranks that send it.
    fetched : this rank is not one of the receivers, and asks for all of it, part by part.
    """

    fresh: float = inf
    asked: int = 0
    retry: float = inf
    retried: int = 0
    attempts: int = 0
    seen: int = 0
    since: float = 0.0
    acknowledged: int = 0
    window: int = 0
    sources: set[int] = field(default_factory=set)
    fetched: bool = False

    @property
    def deadline(self) -> float:
        return min(self.fresh, self.retry)
