"""Requests to shards on other nodes as messages, on two communicators of their own: one for requests, one for answers.

Each communicator counts the bytes of one thread. Cost: a push is two messages and an answer, a pull a message and two answers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from math import inf
from typing import Any

import numpy as np

from mpiddl.strategies.server.remote_shard import PULL, WORDS, wait_for_answer
from mpiddl.transport.base import ANY_SOURCE
from mpiddl.transport.comm import Comm
from mpiddl.transport.meter import Meter

MESSAGE, ARRAY = 1, 2
"""Tags."""


class MessageLines:
    """Those of one rank, and the requests if it serves workers on other nodes.

    Parameters
    ----------
    comm : Comm
        All ranks.
    servers : sequence of int
        The serving ranks.
    sums : int
        Number of sums behind the numbers of a request.
    limit_s : float, optional
        Seconds after which a worker gives up.

    Communication
    -------------
    Making it is collective: two duplications.
    """

    def __init__(self, comm: Comm, servers: range, sums: int, limit_s: float = inf):
        self._asks, self._answers = comm.Dup(), comm.Dup()
        self._servers, self._sums, self._limit_s = servers, sums, limit_s

    @property
    def meters(self) -> list[Meter]:
        return [self._asks.meter, self._answers.meter]

    def line(self, number: int) -> MessageLine:
        """To server ``number``."""
        return MessageLine(self._asks, self._answers, self._servers[number], self._sums, self._limit_s)

    def requests(self) -> MessageRequests:
        return MessageRequests(self._asks, self._answers, self._sums)

    def Free(self) -> None:
        """The communicators are freed with the one that they are of."""


class MessageLine:
    """See `mpiddl.strategies.server.remote_shard.Line`. A `CommError` if no answer comes within ``limit_s`` seconds."""

    def __init__(self, asks: Comm, answers: Comm, server: int, sums: int, limit_s: float):
        self._asks, self._answers, self._server, self._sums, self._limit_s = asks, answers, server, sums, limit_s

    def start(self, *words: int, out: np.ndarray | None = None, into: np.ndarray | None = None,
              sums: np.ndarray | None = None) -> Callable[[], int]:
        message, answer = np.zeros(WORDS + self._sums, np.int64), np.zeros(1, np.int64)
        message[: len(words)] = words
        if sums is not None:
            message[WORDS:] = sums.view(np.int64)
        under_way = [self._answers.Irecv(answer, self._server, MESSAGE), self._asks.Isend(message, self._server, MESSAGE)]
        if out is not None:
            under_way.append(self._asks.Isend(out, self._server, ARRAY))
        if into is not None:
            under_way.append(self._answers.Irecv(into, self._server, ARRAY))
        return lambda: self._answer(under_way, answer)

    def pull(self, into: np.ndarray) -> Callable[[], int]:
        return self.start(PULL, into=into)

    def _answer(self, under_way: list[Any], answer: np.ndarray) -> int:
        wait_for_answer(under_way, self._server, self._limit_s)
        return int(answer[0])


class MessageRequests:
    """See `mpiddl.strategies.server.remote_shard.Requests`."""

    def __init__(self, asks: Comm, answers: Comm, sums: int):
        self._asks, self._answers = asks, answers
        self._message = np.zeros(WORDS + sums, np.int64)
        self._grads: dict[int, np.ndarray] = {}

    def next(self) -> tuple[int, np.ndarray] | None:
        asked = self._asks.Iprobe(ANY_SOURCE, MESSAGE)
        if asked is None:
            return None
        self._asks.Recv(self._message, asked.source, MESSAGE)
        return asked.source, self._message.copy()

    def params(self, worker: int, like: np.ndarray) -> np.ndarray:
        return like.copy()

    def gradient(self, worker: int, like: np.ndarray) -> Generator[None, None, np.ndarray]:
        if worker not in self._grads:
            self._grads[worker] = np.empty_like(like)
        grad = self._grads[worker]
        yield from _over(self._asks.Irecv(grad, worker, ARRAY))
        return grad

    def answer(self, worker: int, number: int, params: np.ndarray | None) -> Iterator[None]:
        sent = self._answers.Isend(np.array([number]), worker, MESSAGE)
        if params is not None:
            yield from _over(self._answers.Isend(params, worker, ARRAY))
        yield from _over(sent)

    def fail(self, error: BaseException) -> None:
        self._asks.fail(error)


def _over(request: Any) -> Iterator[None]:
    while not request.Test():
        yield
