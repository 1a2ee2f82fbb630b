"""Ranks of which one runs at a time, in one thread: who would block hands the baton on, so every run takes the same path.

Each rank has a clock of its own, which only tells what it is told: computing lets it `pass_time`, and who waits goes on no
earlier than what it waited for. The baton goes to the rank that can go on at the earliest moment, among equals to the next
one in order: so nothing that a rank sees ever comes later from another one's past, and where no time passes ranks take turns.

A rank is a greenlet, a call stack of its own: handing the baton on is a jump to another stack. Where threads woke each other
up a message took two to six times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

from greenlet import getcurrent, greenlet

from mpiddl.errors import CommError


class Ended(BaseException):
    """Unwinds the others after one has failed."""


class Wait(NamedTuple):
    """What a rank waits for: since when it can go on, None if not yet; and words for the error if it never can.

    since : no function at all, where it is only its own clock that others have to reach.
    asks : it only asks, again and again, and goes on with the next that happens anywhere.
    """

    since: Callable[[], float | None] | None
    what: str
    asks: bool = False


class Turns:
    """``size`` ranks, and the baton that one of them holds.

    clocks : seconds of each rank.
    error : the first that a rank has raised, or that all of them wait for each other.
    """

    def __init__(self, size: int):
        self.size = size
        self.clocks = [0.0] * size
        self.error: BaseException | None = None
        self._stacks: list[greenlet] = []
        self._waits: list[Wait | None] = [Wait(None, "its first turn")] * size

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """What ``program(rank)`` returned, in rank order; the first exception of any ends all and is raised here."""
        results: list[Any] = [None] * self.size
        below = getcurrent()

        def body(rank: int) -> int:
            below.switch()
            try:
                if self.error is None:
                    results[rank] = program(rank)
            except Ended:
                pass
            except BaseException as error:
                self.error = self.error or error
            return rank

        self._stacks = [greenlet(body) for _ in range(self.size)]
        for rank, stack in enumerate(self._stacks):  # each begins here: begun by another rank it would lie on top of that one
            stack.switch(rank)
        ended = self.size - 1
        while (chosen := self._next(ended)) is not None:  # whoever ends comes back here, with its rank
            ended = self._stacks[chosen].switch()
            self._waits[ended] = None
        self._stacks.clear()
        if self.error is not None:
            raise self.error
        return results

    def wait(self, rank: int, since: Callable[[], float | None] | None, what: str, asks: bool = False) -> None:
        """Hand the baton on until ``since()`` is a moment; the caller holds it again on return, no earlier than that.

        ``since`` changes nothing: it is asked again and again, or never. One who ``asks`` for a turn gets it back when the
        others have had theirs, at the latest.
        """
        self._waits[rank] = Wait(since, what, asks)
        chosen = self._next(rank)
        assert chosen is not None  # this rank waits, at least
        if chosen != rank:
            self._stacks[chosen].switch()
        if self.error is not None:
            raise Ended

    def pass_time(self, rank: int, seconds: float) -> None:
        """This rank computes for so long, while those that are earlier go on."""
        self.clocks[rank] += seconds
        self.wait(rank, None, "its time")

    def _next(self, rank: int) -> int | None:
        """Who goes on after ``rank``; after an error all do, to unwind. None if none is left."""
        order = [other for other in (*range(rank + 1, self.size), *range(rank + 1)) if self._waits[other] is not None]
        if not order:
            return None
        if self.error is None and (found := self._first(order)) is not None:
            moment, chosen = found
            self.clocks[chosen] = moment
            return chosen
        self.error = self.error or self._deadlock()
        return order[0]

    def _first(self, order: list[int]) -> tuple[float, int] | None:
        """Who goes on first, and when; among equals who comes first in ``order``; None if nobody can."""
        first, chosen = inf, -1
        asking: list[tuple[float, int]] = []
        for rank in order:
            clock = self.clocks[rank]
            if clock >= first:  # it goes on no earlier than that, and its turn is later
                continue
            since, _, asks = self._waits[rank]  # type: ignore[misc]
            moment = clock if since is None else since()
            if moment is None and asks:
                asking.append((clock, rank))
            elif moment is not None and max(moment, clock) < first:
                first = max(moment, clock)
                chosen = next((other for earlier, other in asking if earlier <= first), rank)  # who asks goes with the others
        return (first, chosen) if first < inf else min(asking, key=itemgetter(0), default=None)

    def _deadlock(self) -> CommError:
        waits = [(rank, wait) for rank, wait in enumerate(self._waits) if wait is not None]
        lines = "; ".join(f"rank {rank} waits for {wait.what}" for rank, wait in waits)
        return CommError(f"virtual ranks are deadlocked: {lines}")
