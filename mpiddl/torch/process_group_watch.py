"""Watches over what a rank waits for: a collective that does not end within its group's timeout ends the job.

A rank that waits for long writes so into the store, with the number of the operation; a rank that leaves the program, or its
groups, writes that. So the message can name the ranks that never came to the operation. Nothing is written for operations that
take no longer than usual.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from mpiddl.errors import CommError
from mpiddl.machine.clock import now
from mpiddl.torch.process_group_work import Job

PAUSE_S = 0.5
"""Between two looks, and the longest that something may take without a word to the store."""

LEFT_S = 10.0
"""How long a rank waits for one that has left: its message may have been sent before."""

LEFT, WAITS, ENDED = "mpiddl/left", "mpiddl/waits", "mpiddl/ended"


class Watched:
    """What is looked at of one group.

    Parameters
    ----------
    group : MpiddlProcessGroup
    store : torch.distributed.Store
        That all ranks of the group share.
    """

    def __init__(self, group: Any, store: Any):
        self._group, self._store = group, store
        self._told = 0

    def look(self) -> None:
        """Once in a while; ends the job where that is all there is to do."""
        job: Job | None = self._group.running
        if job is None or not job.began:
            return
        waited, limit = now() - job.began, self._group.timeout.total_seconds()
        if waited < min(PAUSE_S, limit / 4):
            return
        if self._told != job.sequence:
            self._told = job.sequence
            with suppress(Exception):  # its server may be gone
                self._store.set(f"{WAITS}/{self._group.rank()}", str(job.sequence))
        gone = self.left() if waited > min(LEFT_S, limit) else []
        if self._group.running is job and not job.patient and (gone or waited > limit):
            self._end(job, waited, gone)

    def left(self) -> list[int]:
        """The ranks of the group that have left it before the collective that this rank is in."""
        job = self._group.running
        return [] if job is None else [rank for rank, last in self._last().items() if last < job.sequence]

    def any_left(self) -> bool:
        """Whether some rank has left the group."""
        return bool(self._last())

    def lost(self, rank: int | None, waited: float) -> bool:
        """Whether a message to or from ``rank``, or with None from any rank, can come no more after ``waited`` seconds."""
        if waited < LEFT_S:
            return False
        gone = self._last()
        return len(gone) >= self._group.size() - 1 if rank is None else rank in gone

    def _last(self) -> dict[int, int]:
        """The ranks that have left, and the last collective that each has completed."""
        found = {rank: self._find(f"{LEFT}/{rank}") for rank in range(self._group.size())}
        return {rank: int(last) for rank, last in found.items() if last is not None}

    def leave(self) -> None:
        """This rank is no longer there for the others."""
        with suppress(Exception):
            self._store.set(f"{LEFT}/{self._group.rank()}", str(self._group.completed))

    def _find(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except Exception:
            return None

    def trouble(self, job: Job, waited: float, gone: list[int]) -> CommError:
        """What is said of an operation that does not end."""
        own, sequence = self._group.rank(), str(job.sequence)
        absent = [rank for rank in range(self._group.size()) if rank != own and self._find(f"{WAITS}/{rank}") != sequence]
        if gone:
            why = f"ranks {gone} of the group have left the program or destroyed the group"
        elif absent:
            why = f"ranks {absent} of the group have not come to it"
        else:
            why = "all ranks of the group have come to it"
        return CommError(f"{job.name}: got no result in {waited:.3g} s (operation {sequence} of group {self._group.label!r}; "
                         f"{why}), expected the same call on every rank within the timeout of the group")

    def _end(self, job: Job, waited: float, gone: list[int]) -> None:
        told = self.trouble(job, waited, gone)
        with suppress(Exception):
            if self._store.add(ENDED, 1) > 1:
                time.sleep(PAUSE_S)  # another rank tells, and ends the job
        self._group.end_job(told)


class Watch:
    """One thread for all groups of a process; it ends with the last of them."""

    def __init__(self) -> None:
        self._watched: WeakSet[Watched] = WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, watched: Watched) -> None:
        with self._lock:
            self._watched.add(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpiddl watch", daemon=True)
                self._thread.start()

    def remove(self, watched: Watched) -> None:
        with self._lock:
            self._watched.discard(watched)

    def _run(self) -> None:
        while True:
            with self._lock:
                watched = list(self._watched)
                if not watched:
                    self._thread = None
                    return
            limits = [each._group.timeout.total_seconds() for each in watched]
            for each in watched:
                each.look()
            del each, watched
            time.sleep(min(PAUSE_S, *(limit / 8 for limit in limits)))
