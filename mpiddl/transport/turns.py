"""Threads of which only one runs at a time: who would block hands the baton on, in order, so every run takes the same path."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from mpiddl.errors import CommError


class Ended(BaseException):
    """Unwinds the others after one has failed."""


class Wait(NamedTuple):
    """What a rank waits for: a test, and words for the error if it never comes true."""

    ready: Callable[[], bool]
    what: str


class Turns:
    """``size`` ranks, each a thread, and the baton that one of them holds.

    error : the first that a rank has raised, or that all of them wait for each other.
    """

    def __init__(self, size: int):
        self.size = size
        self.error: BaseException | None = None
        self._baton = [threading.Semaphore(0) for _ in range(size)]
        self._waits: list[Wait | None] = [Wait(lambda: True, "its first turn")] * size

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

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Hand the baton on until ``ready()``; the caller holds it again on return."""
        self._waits[rank] = Wait(ready, what)
        chosen = self._hand_on(rank)
        if chosen != rank:
            self._baton[rank].acquire()
        if self.error is not None:
            raise Ended

    def _hand_on(self, rank: int) -> int | None:
        """Give the baton to the next rank that can go on; after an error to everybody, to unwind."""
        order = [(rank + step) % self.size for step in range(1, self.size + 1)]
        waiting = [(other, wait) for other in order if (wait := self._waits[other]) is not None]
        if not waiting:
            return None
        chosen = waiting[0][0] if self.error else next((other for other, wait in waiting if wait.ready()), None)
        if chosen is None:
            lines = "; ".join(f"rank {other} waits for {wait.what}" for other, wait in sorted(waiting, key=lambda w: w[0]))
            self.error = CommError(f"virtual ranks are deadlocked: {lines}")
            chosen = waiting[0][0]
        if chosen != rank:
            self._baton[chosen].release()
        return chosen
