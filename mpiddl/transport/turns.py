"""Threads of which only one runs at a time: who would block hands the baton on, so every run takes the same path.

Each rank has a clock of its own, which only tells what it is told: computing lets it `pass_time`, and who waits goes on no
earlier than what it waited for. The baton goes to the rank that can go on at the earliest moment, among equals to the next
one in order: so nothing that a rank sees ever comes later from another one's past, and where no time passes ranks take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from mpiddl.errors import CommError


class Ended(BaseException):
    """Unwinds the others after one has failed."""


class Wait(NamedTuple):
    """What a rank waits for: since when it can go on, None if not yet; and words for the error if it never can.

    asks : it only asks, again and again, and goes on with the next that happens anywhere.
    """

    since: Callable[[], float | None]
    what: str
    asks: bool = False


class Turns:
    """``size`` ranks, each a thread, and the baton that one of them holds.

    clocks : seconds of each rank.
    error : the first that a rank has raised, or that all of them wait for each other.
    """

    def __init__(self, size: int):
        self.size = size
        self.clocks = [0.0] * size
        self.error: BaseException | None = None
        self._baton = [threading.Semaphore(0) for _ in range(size)]
        self._waits: list[Wait | None] = [Wait(lambda: 0.0, "its first turn")] * size

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """What ``program(rank)`` returned, in rank order; the first exception of any ends all and is raised here."""
        results: list[Any] = [None] * self.size

        def body(rank: int) -> None:
            try:
                self._baton[rank].acquire()
                if self.error is None:
                    results[rank] = program(rank)
            except Ended:
                pass
            except BaseException as error:
                self.error = self.error or error
            self._waits[rank] = None
            self._hand_on(rank)

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._baton[0].release()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        return results

    def wait(self, rank: int, since: Callable[[], float | None], what: str, asks: bool = False) -> None:
        """Hand the baton on until ``since()`` is a moment; the caller holds it again on return, no earlier than that.

        One who ``asks`` gets it back when the others have had their turn, at the latest.
        """
        self._waits[rank] = Wait(since, what, asks)
        chosen = self._hand_on(rank)
        if chosen != rank:
            self._baton[rank].acquire()
        if self.error is not None:
            raise Ended

    def pass_time(self, rank: int, seconds: float) -> None:
        """This rank computes for so long, while those that are earlier go on."""
        self.clocks[rank] += seconds
        self.wait(rank, lambda: self.clocks[rank], "its time")

    def _hand_on(self, rank: int) -> int | None:
        """Give the baton to the rank that can go on first; after an error to everybody, to unwind."""
        order = [(rank + step) % self.size for step in range(1, self.size + 1)]
        waiting = [(other, wait) for other in order if (wait := self._waits[other]) is not None]
        if not waiting:
            return None
        moments = self._moments(waiting)
        if self.error or not moments:
            chosen = waiting[0][0]
        else:
            moment, chosen = min(moments, key=itemgetter(0))
            self.clocks[chosen] = moment
        if not self.error and not moments:
            lines = "; ".join(f"rank {other} waits for {wait.what}" for other, wait in sorted(waiting, key=itemgetter(0)))
            self.error = CommError(f"virtual ranks are deadlocked: {lines}")
        if chosen != rank:
            self._baton[chosen].release()
        return chosen

    def _moments(self, waiting: list[tuple[int, Wait]]) -> list[tuple[float, int]]:
        """When each of those that can go on would do so, in their order."""
        found = {rank: wait.since() for rank, wait in waiting}
        known = {rank: max(moment, self.clocks[rank]) for rank, moment in found.items() if moment is not None}
        first = min(known.values(), default=0.0)
        asking = {rank: max(first, self.clocks[rank]) for rank, wait in waiting if wait.asks and rank not in known}
        return [(moment, rank) for rank, _ in waiting if (moment := known.get(rank, asking.get(rank))) is not None]
