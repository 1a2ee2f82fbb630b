"""A transport that does nothing but move messages, through queues between threads: what a new transport must offer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiddl.transport.base import ANY_SOURCE, ANY_TAG, Envelope, Transport
from mpiddl.transport.comm import Comm
from mpiddl.transport.in_flight import InFlight

LIMIT_S = 60.0


class Post:
    """All messages under way: for each group and receiver, in the order in which they were sent."""

    def __init__(self) -> None:
        self.news = threading.Condition()
        self.boxes: dict[Any, list[tuple[int, int, np.ndarray]]] = {}
        self.failed = False

    def wait(self, found: Callable[[], Any]) -> Any:
        """What ``found`` gives as soon as that is something."""
        with self.news:
            self.news.wait_for(lambda: self.failed or found() is not None, LIMIT_S)
            if (what := found()) is None:
                raise TimeoutError("no rank sends what is waited for")
            return what


class QueueTransport(Transport):
    """One rank of a group; ``name`` is that of the group, the same on all its ranks."""

    error = TimeoutError

    def __init__(self, post: Post, ranks: Sequence[int], rank: int, name: tuple[int, ...] = ()):
        self._post, self._ranks, self._name = post, ranks, name
        self.rank, self.size = rank, len(ranks)
        self._groups = 0
        self._expected: list[Receive] = []

    def isend(self, buf: np.ndarray, dest: int, tag: int) -> Done:
        with self._post.news:
            self._post.boxes.setdefault((self._name, dest), []).append((self.rank, tag, buf.copy()))
            self._post.news.notify_all()
        return Done()

    def irecv(self, buf: np.ndarray, source: Any, tag: Any) -> Receive:
        return Receive(self, buf, source, tag)

    def probe(self, source: Any, tag: Any) -> Envelope:
        return self._post.wait(lambda: self.iprobe(source, tag))

    def iprobe(self, source: Any, tag: Any) -> Envelope | None:
        with self._post.news:
            found = self.place(source, tag)
            return None if found is None else Envelope(*self.box[found][:2])

    def group(self, ranks: Sequence[int]) -> QueueTransport:
        self._groups += 1
        name = (*self._name, self._groups, ranks[0])
        return QueueTransport(self._post, [self._ranks[rank] for rank in ranks], ranks.index(self.rank), name)

    def free(self) -> None:
        pass

    @property
    def box(self) -> list[tuple[int, int, np.ndarray]]:
        return self._post.boxes.setdefault((self._name, self.rank), [])

    def place(self, source: Any, tag: Any) -> int | None:
        """Where the first message lies that fits."""
        fits = (place for place, (its_source, its_tag, _) in enumerate(self.box)
                if source in (ANY_SOURCE, its_source) and tag in (ANY_TAG, its_tag))
        return next(fits, None)


class Done:
    """A message that was sent: it lies in the receiver's box."""

    def Wait(self) -> None:
        pass

    def Test(self) -> bool:
        return True


class Receive:
    """A message that is expected. Those that were expected first are received first."""

    def __init__(self, transport: QueueTransport, buf: np.ndarray, source: Any, tag: Any):
        self._transport, self._buf, self._what, self._over = transport, buf, (source, tag), False
        transport._expected.append(self)

    def Wait(self) -> None:
        self._transport._post.wait(lambda: self._take() or None)

    def Test(self) -> bool:
        time.sleep(0)  # a turn for the other threads
        with self._transport._post.news:
            return self._take()

    def _take(self) -> bool:
        for earlier in list(self._transport._expected):
            if earlier is not self and earlier._what == self._what and not self._over:
                earlier._take()
            if earlier is self:
                break
        if not self._over and (place := self._transport.place(*self._what)) is not None:
            array = self._transport.box.pop(place)[2]
            self._buf.reshape(-1)[: array.size] = array.reshape(-1)
            self._transport._expected.remove(self)
            self._over = True
        return self._over


def run(size: int, program: Callable[[Comm], Any]) -> list[Any]:
    """``program(comm)`` on ``size`` threads; what each returned, in rank order. The first exception is raised here."""
    post, results, errors = Post(), [None] * size, list[BaseException]()

    def of_rank(rank: int) -> None:
        try:
            results[rank] = program(Comm(QueueTransport(post, range(size), rank), InFlight()))
        except BaseException as error:
            with post.news:
                errors.append(error)
                post.failed = True
                post.news.notify_all()

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
