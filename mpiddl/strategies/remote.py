"""Shards and ledger of another node: a thread of the rank that serves them does there what its worker asks for.

A worker asks by a short message and gets a short answer. The gradient follows a push, the parameters come after a pull: V bytes
out and V in for a step, as with a server of its own. The thread serves while its rank computes: compiled kernels and numpy give
up the interpreter lock. It sleeps between two looks while nobody asks, and not while anything is on its way: both libraries
move messages over TCP inside their calls only. Several workers are served in turns, each when its message has come.

Cost: a rank that serves keeps, for each worker on another node, a copy of what it has pulled and the room for a gradient, and
its moments where each worker has its own. It needs an MPI that takes calls from several threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpiddl.clock import now
from mpiddl.errors import CommError
from mpiddl.strategies.ledger import Ledger
from mpiddl.strategies.shard import Shard
from mpiddl.transport.base import ANY_SOURCE

MESSAGE, ARRAY = 1, 2
"""Tags."""

PUSH, PULL, ENTER, ARRIVE, DECIDED, LEAVE = range(6)
"""What is asked for: the first of the four numbers of a message; the others are what the functions of this name take."""

SHORTEST_S, LONGEST_S = 0.0001, 0.001
"""Between two looks of a thread that nobody asks for anything, the longer the less was asked lately."""

LINGER_S = 1.0
"""How long a thread that is to end waits for messages that are under way: after a failure nobody may take them."""


class Line:
    """A worker's end: asks ``server`` and waits for the answer.

    Parameters
    ----------
    comms : (Comm, Comm)
        One for what is asked, one for the answers: each counts what one thread sends.
    server : int
    limit_s : float, optional

    Raises
    ------
    CommError
        If there is a limit of seconds, and no answer came within it.
    """

    def __init__(self, comms: Sequence[Any], server: int, limit_s: float = float("inf")):
        (self._asks, self._answers), self._server, self._limit_s = comms, server, limit_s

    def start(self, *words: int, out: np.ndarray | None = None, into: np.ndarray | None = None) -> Callable[[], int]:
        """Send the message, and a gradient ``out`` with it; what it returns waits for the answer, and parameters ``into``."""
        message, answer = np.zeros(4, np.int64), np.zeros(1, np.int64)
        message[: len(words)] = words
        under_way = [self._answers.Irecv(answer, self._server, MESSAGE), self._asks.Isend(message, self._server, MESSAGE)]
        if out is not None:
            under_way.append(self._asks.Isend(out, self._server, ARRAY))
        if into is not None:
            under_way.append(self._answers.Irecv(into, self._server, ARRAY))
        return lambda: self._answer(under_way, answer)

    def ask(self, *words: int) -> int:
        """Send a message, and wait for the answer."""
        return self.start(*words)()

    def _answer(self, under_way: list[Any], answer: np.ndarray) -> int:
        until = now() + self._limit_s
        while under_way := [request for request in under_way if not request.Test()]:
            os.sched_yield()
            if now() > until:
                raise CommError(f"rank {self._server} did not answer within {self._limit_s:g} s")
        return int(answer[0])


class RemoteShard:
    """A shard, as a worker on another node has it; see `Shard`. The copies and moments of this worker are the server's."""

    def __init__(self, line: Line):
        self._line = line

    def push(self, grad: np.ndarray, before: np.ndarray, worker: int, pulled: int, count: int,
             moments: dict[str, np.ndarray]) -> Callable[[], int]:
        return self._line.start(PUSH, pulled, count, out=grad)

    def pull(self, into: np.ndarray) -> Callable[[], int]:
        return self._line.start(PULL, into=into)


class RemoteLedger:
    """The ledger, as a worker on another node has it; see `Ledger`."""

    def __init__(self, line: Line):
        self._line = line

    def enter(self, budget: int) -> bool:
        return bool(self._line.ask(ENTER, budget))

    def arrive(self, version: int, every: int, budget: int) -> int:
        return self._line.ask(ARRIVE, version, every, budget)

    def decided(self, number: int) -> int:
        return self._line.ask(DECIDED, number)

    def leave(self) -> None:
        self._line.ask(LEAVE)


class Desk:
    """The thread of a rank that serves.

    Parameters
    ----------
    comms : (Comm, Comm)
        As for a `Line`.
    shard, ledger : Shard, Ledger
        Of the thread's own; one that keeps no ledger is never asked about it.
    workers : sequence of int
        Those on other nodes.
    moments : dict of str to ndarray
        What each of them begins with, if it has its own.
    saved : dict or None
        What `saved` gave, to go on from.

    Attributes
    ----------
    saved : dict
        Of each worker, by its rank, what it has pulled and its moments: views.
    """

    def __init__(self, comms: Sequence[Any], shard: Shard, ledger: Ledger | None, workers: Sequence[int],
                 moments: dict[str, np.ndarray], saved: dict[str, Any] | None):
        (self._asks, self._answers), self._shard, self._ledger = comms, shard, ledger
        fresh = {"params": shard.arrays["params"], **moments}
        begin = {str(worker): (saved or {}).get(str(worker), fresh) for worker in workers}
        self.saved = {worker: {name: array.copy() for name, array in its.items()} for worker, its in begin.items()}
        self._room: list[np.ndarray] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpiddl parameter server", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """After the last answer has been taken."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # workers wait for an answer that never comes
            self._asks.fail(error)

    def _serve(self) -> None:
        busy: list[Iterator[None]] = []
        until, message, pause = float("inf"), np.zeros(4, np.int64), SHORTEST_S
        while not self._end.is_set() or (busy and now() < until):
            if self._end.is_set():
                until = min(until, now() + LINGER_S)
            asked = self._asks.Iprobe(ANY_SOURCE, MESSAGE)
            if asked:
                self._asks.Recv(message, asked.source, MESSAGE)
                busy.append(self._answer(asked.source, *message.tolist()))
            busy = [worker for worker in busy if next(worker, self) is None]
            pause = SHORTEST_S if busy or asked else min(pause * 1.1, LONGEST_S)
            if not busy:
                time.sleep(pause)

    def _answer(self, worker: int, what: int, first: int, second: int, third: int) -> Iterator[None]:
        """Do what ``worker`` asks for, bit by bit: yields where it would wait for a message."""
        if what == PUSH:
            its = self.saved[str(worker)]
            grad = self._room.pop() if self._room else np.empty_like(its["params"])
            yield from _over(self._asks.Irecv(grad, worker, ARRAY))
            moments = {name: array for name, array in its.items() if name != "params"}
            answer = self._shard.push(grad, its["params"], worker, first, second, moments)()
            self._room.append(grad)
        elif what == PULL:
            answer = self._shard.pull(self.saved[str(worker)]["params"])()
        else:
            answer = self._booked(what, first, second, third)
        sent = self._answers.Isend(np.array([answer]), worker, MESSAGE)
        if what == PULL:
            yield from _over(self._answers.Isend(self.saved[str(worker)]["params"], worker, ARRAY))
        yield from _over(sent)

    def _booked(self, what: int, first: int, second: int, third: int) -> int:
        assert self._ledger is not None  # workers ask the rank that keeps it
        if what == ENTER:
            return int(self._ledger.enter(first))
        if what == ARRIVE:
            return self._ledger.arrive(first, second, third)
        if what == DECIDED:
            return self._ledger.decided(first)
        self._ledger.leave()
        return 0


def _over(request: Any) -> Iterator[None]:
    while not request.Test():
        yield
