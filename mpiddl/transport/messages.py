"""Collectives made of messages, for a transport that has none of its own: every rank sends its part to every other one.

Cost: P - 1 messages a rank, each with all of the rank's part; an all-gather of bytes twice that. Arrays are combined in rank
order, so that all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiddl.transport.base import COMBINE, IN_PLACE, Collectives, Op, Request, Transport

TAGS = 32_768


class Messages(Collectives):
    """Collectives on ``transport``, on which nothing else is sent."""

    def __init__(self, transport: Transport):
        self._transport, self._calls = transport, 0

    def iallreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op) -> Request:
        def combine(parts: list[np.ndarray]) -> None:
            recvbuf[...] = parts[0]
            for part in parts[1:]:
                COMBINE[op](recvbuf, part, out=recvbuf)

        return self._gathered(np.array(recvbuf if sendbuf is IN_PLACE else sendbuf), combine)

    def allreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op) -> None:
        self.iallreduce(sendbuf, recvbuf, op).Wait()

    def bcast(self, buf: np.ndarray, root: int) -> None:
        self._gathered(np.array(buf), lambda parts: np.copyto(buf, parts[root])).Wait()

    def ibarrier(self) -> Request:
        return self._gathered(np.empty(0, np.uint8), lambda parts: None)

    def barrier(self) -> None:
        self.ibarrier().Wait()

    def allgather(self, mine: bytes) -> list[bytes]:
        lengths, found = np.zeros(self._transport.size, np.int64), list[bytes]()
        self._gathered(np.array([len(mine)]), lambda parts: np.concatenate(parts, out=lengths)).Wait()
        padded = np.frombuffer(mine.ljust(lengths.max()), np.uint8)
        self._gathered(padded, lambda parts: found.extend(part.tobytes() for part in parts)).Wait()
        return [part[:length] for part, length in zip(found, lengths, strict=True)]

    def broadcast(self, mine: bytes, root: int) -> bytes:
        return self.allgather(mine)[root]

    def _gathered(self, mine: np.ndarray, then: Callable[[list[np.ndarray]], Any]) -> Gathered:
        self._calls += 1
        return Gathered(self._transport, mine, self._calls % TAGS, then)


class Gathered:
    """All ranks' arrays, which have one shape and dtype, on their way; ``then`` is called once with them, in rank order."""

    def __init__(self, transport: Transport, mine: np.ndarray, tag: int, then: Callable[[list[np.ndarray]], Any]):
        self._then: Callable[[list[np.ndarray]], Any] | None = then
        others = [rank for rank in range(transport.size) if rank != transport.rank]
        self._parts = [mine if rank == transport.rank else np.empty_like(mine) for rank in range(transport.size)]
        self._requests = [transport.irecv(self._parts[rank], rank, tag) for rank in others]
        self._requests += [transport.isend(mine, rank, tag) for rank in others]

    def Wait(self) -> None:
        for request in self._requests:
            request.Wait()
        self._finish()

    def Test(self) -> bool:
        over = sum(request.Test() for request in self._requests) == len(self._requests)
        if over:
            self._finish()
        return over

    def _finish(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(self._parts)
