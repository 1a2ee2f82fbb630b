"""Requests to shards on other nodes over remote memory: one-sided writes and reads in place of messages.

A worker writes its gradient and its request into memory of the server, and then a flag: the number of the request. The server
polls its flags. It writes its answer into memory of the worker, and then a flag. Parameters are read by the worker:

- of a rule that does not need to know what was pulled (`Rule.needs_pulled`), out of the shard itself, without the server. The
  number of changes is read before and after: if it has changed, or a change is under way, the copy is made again. After some
  tries the server makes it.
- else out of the copy that the server has made and keeps for the rule.

Each request of a worker has the same place in the memory of a server: it makes the next one when it has the answer to the last.

Cost: a push is three writes, and an answer of two. A pull is three reads, V bytes and twice 8; or a request, an answer and a
read.
Source: Xue et al., Fast distributed deep learning over RDMA, EuroSys 2019, arXiv:1805.08430, section 3.2 (static placement).
Reading the shard itself, as a guarded copy, is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from math import inf

import numpy as np

from mpiddl.layout import ceil_div
from mpiddl.memory import ALIGNMENT
from mpiddl.node.guard import TRIES, Guard
from mpiddl.node.topology import Topology
from mpiddl.remote_memory import RemoteMemory, allocate, expose
from mpiddl.remote_memory.base import WORD
from mpiddl.strategies.server.remote_shard import PULL, WORDS, wait_for_answer
from mpiddl.transport.base import Request
from mpiddl.transport.comm import Comm
from mpiddl.transport.meter import Meter


class Layout:
    """Where requests and answers lie; integers only.

    Parameters
    ----------
    topology : Topology
    servers : range
        The serving ranks.
    spans : sequence of (int, int)
        Begin and end of each server's shard.
    itemsize : int
        Bytes of a parameter.
    sums : int
        Number of sums behind the numbers of a request.

    Attributes
    ----------
    far : list of list of int
        For each server, the workers on other nodes.
    """

    def __init__(self, topology: Topology, servers: range, spans: Sequence[tuple[int, int]], itemsize: int, sums: int):
        self._ranks, self.servers, self.words = topology.size, servers, WORDS + sums
        self._sizes = [(end - begin) * itemsize for begin, end in spans]
        near = [topology.nodes[topology.node(rank)] for rank in servers]
        self.far = [[rank for rank in range(topology.size) if rank not in its] for its in near]

    def request(self, server: int, worker: int) -> int:
        """First byte of a worker's request in the server's memory; gradient and parameters follow."""
        slot = self._lines(WORD * self.words) + 2 * self._lines(self._sizes[server])
        return slot * self.far[server].index(worker)

    def gradient(self, server: int, worker: int) -> int:
        return self.request(server, worker) + self._lines(WORD * self.words)

    def params(self, server: int, worker: int) -> int:
        return self.gradient(server, worker) + self._lines(self._sizes[server])

    def answers(self, rank: int) -> int:
        """First byte of a rank's answers, one number of each server."""
        if rank not in self.servers:
            return 0
        server = self.servers.index(rank)
        far = self.far[server]
        return self.params(server, far[-1]) + self._lines(self._sizes[server]) if far else 0

    def nbytes(self, rank: int) -> int:
        """Memory of a rank."""
        return self.answers(rank) + WORD * len(self.servers)

    @property
    def flags(self) -> int:
        """Of each rank: one for the requests of each worker, one for the answers of each server."""
        return self._ranks + len(self.servers)

    def answered(self, server: int) -> int:
        """The flag of a server's answers."""
        return self._ranks + server

    @staticmethod
    def _lines(nbytes: int) -> int:
        return ceil_div(nbytes, ALIGNMENT) * ALIGNMENT


class MemoryLines:
    """Those of one rank, and the requests if it serves workers on other nodes.

    Parameters
    ----------
    comm : Comm
        All ranks.
    layout : Layout
    segment : ndarray of uint8
        The guarded shard of this rank (`mpiddl.strategies.server.shard`), with its guard first; empty if it serves none.
    shared : bool
        Workers read shards themselves.
    kind : str
        See `mpiddl.remote_memory.allocate`.
    limit_s : float, optional
        Seconds after which a worker gives up.

    Attributes
    ----------
    direct : bool
        Workers read shards themselves.

    Communication
    -------------
    Making it and freeing it is collective.
    """

    def __init__(self, comm: Comm, layout: Layout, segment: np.ndarray, shared: bool, kind: str, limit_s: float = inf):
        self._comm, self._layout, self._limit_s, self.direct = comm.Dup(), layout, limit_s, shared
        self._memory = allocate(comm, layout.nbytes(comm.rank), layout.flags, kind)
        self._shards = expose(comm, segment.view(np.int64), kind) if shared else None
        self.meters = [Meter()]

    def line(self, number: int) -> MemoryLine:
        """To server ``number``."""
        return MemoryLine(self._memory, self._shards, self._layout, number, self.meters[0], self._limit_s)

    def requests(self) -> MemoryRequests:
        self.meters.append(Meter())  # a thread's own
        return MemoryRequests(self._comm, self._memory, self._layout, self.meters[-1])

    def Free(self) -> None:
        self._memory.Free()
        if self._shards is not None:
            self._shards.Free()


class MemoryLine:
    """See `mpiddl.strategies.server.remote_shard.Line`. A `CommError` if no answer comes within ``limit_s`` seconds."""

    def __init__(self, memory: RemoteMemory, shards: RemoteMemory | None, layout: Layout, server: int, meter: Meter,
                 limit_s: float):
        self._memory, self._shards, self._layout = memory, shards, layout
        self._server, self._rank, self._meter, self._limit_s = server, layout.servers[server], meter, limit_s
        self._message, self._count = np.zeros(layout.words, np.int64), 0
        self._answer = memory.local[layout.answers(memory.rank) + WORD * server :][:WORD].view(np.int64)
        self._changes = np.zeros(1, np.int64)

    def start(self, *words: int, out: np.ndarray | None = None, into: np.ndarray | None = None,
              sums: np.ndarray | None = None) -> Callable[[], int]:
        memory, layout, rank, own = self._memory, self._layout, self._rank, self._memory.rank
        self._message[:] = 0
        self._message[: len(words)] = words
        if sums is not None:
            self._message[WORDS:] = sums.view(np.int64)
        self._count += 1
        under_way = [] if out is None else [self._write(layout.gradient(self._server, own), out)]
        under_way.append(self._write(layout.request(self._server, own), self._message))
        under_way += [memory.signal(rank, own, self._count), memory.arrived(layout.answered(self._server), self._count)]

        def finish() -> int:
            self._wait(under_way)
            if into is not None:
                self._meter.sent(into.nbytes)
                self._wait([memory.read(rank, layout.params(self._server, own), into)])
            return self._answer.item()

        return finish

    def pull(self, into: np.ndarray) -> Callable[[], int]:
        if self._shards is None:
            return self.start(PULL, into=into)
        shards, changes = self._shards, self._changes
        return lambda: self._copy(shards, changes, into)

    def _copy(self, shards: RemoteMemory, changes: np.ndarray, into: np.ndarray) -> int:
        """One read after the other: a device may fetch what two reads ask for in any order."""
        for _ in range(TRIES):
            self._wait([shards.read(self._rank, WORD * Guard.CHANGES, changes)])
            before = changes.item()
            self._wait([shards.read(self._rank, WORD * Guard.WORDS, into)])
            self._wait([shards.read(self._rank, WORD * Guard.CHANGES, changes)])
            self._meter.sent(into.nbytes + 2 * WORD)
            if changes.item() == before and before % 2 == 0:
                return before // 2
        return self.start(PULL, into=into)()

    def _write(self, begin: int, array: np.ndarray) -> Request:
        self._meter.sent(array.nbytes)
        return self._memory.write(self._rank, begin, array)

    def _wait(self, under_way: list[Request]) -> None:
        wait_for_answer(under_way, self._rank, self._limit_s)


class MemoryRequests:
    """See `mpiddl.strategies.server.remote_shard.Requests`."""

    def __init__(self, comm: Comm, memory: RemoteMemory, layout: Layout, meter: Meter):
        self._comm, self._memory, self._layout, self._meter = comm, memory, layout, meter
        self._server = layout.servers.index(memory.rank)
        self._counts = dict.fromkeys(layout.far[self._server], 0)

    def next(self) -> tuple[int, np.ndarray] | None:
        for worker, count in self._counts.items():
            if self._memory.arrived(worker, count + 1).Test():
                self._counts[worker] = count + 1
                words = self._layout.words
                request = self._array(self._layout.request(self._server, worker), np.zeros(words, np.int64))
                return worker, request.copy()
        return None

    def params(self, worker: int, like: np.ndarray) -> np.ndarray:
        array = self._array(self._layout.params(self._server, worker), like)
        array[:] = like
        return array

    def gradient(self, worker: int, like: np.ndarray) -> Generator[None, None, np.ndarray]:
        yield from ()  # it was there before the flag of the request
        return self._array(self._layout.gradient(self._server, worker), like)

    def answer(self, worker: int, number: int, params: np.ndarray | None) -> Iterator[None]:
        answer = np.array([number])
        at = self._layout.answers(worker) + WORD * self._server
        self._meter.sent(WORD)
        under_way = [self._memory.write(worker, at, answer),
                     self._memory.signal(worker, self._layout.answered(self._server), self._counts[worker])]
        while under_way := [request for request in under_way if not request.Test()]:
            yield

    def fail(self, error: BaseException) -> None:
        self._comm.fail(error)

    def _array(self, begin: int, like: np.ndarray) -> np.ndarray:
        return self._memory.local[begin : begin + like.nbytes].view(like.dtype)
