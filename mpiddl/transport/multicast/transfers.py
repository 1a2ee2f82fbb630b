"""Transfers under way: what this rank knows of one that it sends, and of one that comes to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

QUIET_S = 0.005
"""Without news of a transfer, until its sender asks the receivers what they have; the pause doubles each time."""

LAGGING_S = 0.1
"""Without a word of a receiver, until its sender no longer waits for it."""


@dataclass
class Outgoing:
    """A transfer that this rank sends.

    round, owner : which one. The owner is another rank if this one sends in its place.
    count, nbytes : its datagrams, and bytes.
    got : by receiver, datagrams that it has.
    windows : by receiver, datagrams that may be under way to it.
    put : this rank has the data; else it only knows that another rank sends in its place.
    next : the datagrams before this one have been sent.
    deadline, pause : when receivers are asked what they have, and the seconds until then.
    news, interval : when a receiver said something new last, and the seconds that pass between two times.
    """

    round: int
    owner: int
    got: dict[int, int]
    count: int = 0
    nbytes: int = 0
    windows: dict[int, int] = field(default_factory=dict)
    put: bool = False
    next: int = 0
    deadline: float = inf
    pause: float = QUIET_S
    news: float = 0.0
    interval: float = 0.0

    def wait_for_news(self, now: float) -> None:
        """Something has happened: be patient from now on."""
        self.interval = max(min(now - self.news, LAGGING_S), 0.75 * self.interval) if self.news else 0.0
        self.news = now
        self.pause = max(QUIET_S, 4 * self.interval)
        self.deadline = now + self.pause


@dataclass
class Incoming:
    """A transfer that has begun to come.

    fresh : when this rank asks for datagrams that it has not asked for yet; ``asked`` is the end of those that it has.
    retry : when it asks again for those before ``retried``; ``attempts``: how often it has.
    since : when it asked last.
    acknowledged, sources : datagrams, and the ranks that send them.
    """

    fresh: float = inf
    asked: int = 0
    retry: float = inf
    retried: int = 0
    attempts: int = 0
    since: float = 0.0
    acknowledged: int = 0
    sources: set[int] = field(default_factory=set)

    @property
    def deadline(self) -> float:
        return min(self.fresh, self.retry)
