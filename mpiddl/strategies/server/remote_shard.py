"""Shards and ledger on another node: a thread of the serving rank executes the requests of the workers.

A worker sends a short message and gets a short answer. A push is followed by the gradient, the answer to a pull by the
parameters: V bytes out and V bytes back per step, as with a two-sided server. The thread works while its rank computes, because
compiled kernels and numpy release the interpreter lock. It polls without sleep while messages are in flight, because both
libraries advance messages over TCP only inside their calls; otherwise it sleeps between two polls. It serves several workers in
turn.

Cost: for each worker on another node, a serving rank keeps a copy of the pulled parameters, a buffer for a gradient, and the
worker's moments if it has its own. Needs `MPI_THREAD_MULTIPLE`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpiddl.errors import CommError
from mpiddl.machine.clock import now
from mpiddl.strategies.server.push_ledger import Ledger
from mpiddl.strategies.server.shard import Shard
from mpiddl.transport.base import ANY_SOURCE

MESSAGE, ARRAY = 1, 2
"""Tags."""

PUSH, PULL, ENTER, ARRIVE, DECIDED, LEAVE = range(6)
"""Requests: the first of the four numbers of a message. The others are the arguments of the function of this name. A PUSH has
the result of `Rule.layer_sums` behind them."""

SHORTEST_S, LONGEST_S = 0.0001, 0.001
"""Shortest and longest sleep between two polls; the sleep grows while there are no requests."""

LINGER_S = 1.0
"""Seconds that a stopping thread waits for messages in flight: after a failure no rank may receive them."""


class Line:
    """The worker's side: sends requests to ``server`` and waits for answers.

    Parameters
    ----------
    comms : (Comm, Comm)
        One for requests, one for answers: each counts the bytes of one thread.
    server : int
    sums : int
        Number of sums behind the four numbers of a message.
    limit_s : float, optional

    Raises
    ------
    CommError
        If no answer came within ``limit_s`` seconds.
    """

    def __init__(self, comms: Sequence[Any], server: int, sums: int = 0, limit_s: float = float("inf")):
        (self._asks, self._answers), self._server, self._sums, self._limit_s = comms, server, sums, limit_s

    def start(self, *words: int, out: np.ndarray | None = None, into: np.ndarray | None = None,
              sums: np.ndarray | None = None) -> Callable[[], int]:
        """Send a request, with a gradient ``out``. Returns a function that waits for the answer and parameters ``into``."""
        message, answer = np.zeros(4 + self._sums, np.int64), np.zeros(1, np.int64)
        message[: len(words)] = words
        if sums is not None:
            message[4:] = sums.view(np.int64)
        under_way = [self._answers.Irecv(answer, self._server, MESSAGE), self._asks.Isend(message, self._server, MESSAGE)]
        if out is not None:
            under_way.append(self._asks.Isend(out, self._server, ARRAY))
        if into is not None:
            under_way.append(self._answers.Irecv(into, self._server, ARRAY))
        return lambda: self._answer(under_way, answer)

    def ask(self, *words: int) -> int:
        """Send a request and wait for the answer."""
        return self.start(*words)()

    def _answer(self, under_way: list[Any], answer: np.ndarray) -> int:
        until = now() + self._limit_s
        while under_way := [request for request in under_way if not request.Test()]:
            os.sched_yield()
            if now() > until:
                raise CommError(f"rank {self._server} did not answer within {self._limit_s:g} s")
        return int(answer[0])


class RemoteShard:
    """A shard, as seen by a worker on another node; see `Shard`. The server holds this worker's copies and moments."""

    def __init__(self, line: Line):
        self._line = line

    def push(self, grad: np.ndarray, before: np.ndarray, worker: int, pulled: int, count: int,
             moments: dict[str, np.ndarray], sums: np.ndarray) -> Callable[[], int]:
        return self._line.start(PUSH, pulled, count, out=grad, sums=sums)

    def pull(self, into: np.ndarray) -> Callable[[], int]:
        return self._line.start(PULL, into=into)


class RemoteLedger:
    """The ledger, as seen by a worker on another node; see `Ledger`."""

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
    """The thread of a serving rank.

    Parameters
    ----------
    comms : (Comm, Comm)
        As for a `Line`.
    shard, ledger : Shard, Ledger
        Objects for this thread. Without a ledger there are no requests about it.
    workers : sequence of int
        Workers on other nodes.
    moments : dict of str to ndarray
        Initial moments of each worker, if workers have their own.
    sums : int
        Number of sums behind the four numbers of a message.
    saved : dict or None
        The value of the attribute ``saved``, for a resumed run.

    Attributes
    ----------
    saved : dict
        By rank of the worker: its pulled parameters and its moments, as views.
    """

    def __init__(self, comms: Sequence[Any], shard: Shard, ledger: Ledger | None, workers: Sequence[int],
                 moments: dict[str, np.ndarray], sums: int, saved: dict[str, Any] | None):
        (self._asks, self._answers), self._shard, self._ledger = comms, shard, ledger
        fresh = {"params": shard.arrays["params"], **moments}
        begin = {str(worker): (saved or {}).get(str(worker), fresh) for worker in workers}
        self.saved = {worker: {name: array.copy() for name, array in its.items()} for worker, its in begin.items()}
        self._room: list[np.ndarray] = []
        self._sums = sums
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpiddl parameter server", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop the thread, after the last answer has been received."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # otherwise workers would wait for ever
            self._asks.fail(error)

    def _serve(self) -> None:
        busy: list[Iterator[None]] = []
        until, message, pause = float("inf"), np.zeros(4 + self._sums, np.int64), SHORTEST_S
        while not self._end.is_set() or (busy and now() < until):
            if self._end.is_set():
                until = min(until, now() + LINGER_S)
            asked = self._asks.Iprobe(ANY_SOURCE, MESSAGE)
            if asked:
                self._asks.Recv(message, asked.source, MESSAGE)
                busy.append(self._answer(asked.source, message.copy()))
            busy = [worker for worker in busy if next(worker, self) is None]
            pause = SHORTEST_S if busy or asked else min(pause * 1.1, LONGEST_S)
            if not busy:
                time.sleep(pause)

    def _answer(self, worker: int, message: np.ndarray) -> Iterator[None]:
        """Execute a request of ``worker``. Yields where it would wait for a message."""
        what, first, second, third = message[:4].tolist()
        if what == PUSH:
            its = self.saved[str(worker)]
            grad = self._room.pop() if self._room else np.empty_like(its["params"])
            yield from _over(self._asks.Irecv(grad, worker, ARRAY))
            moments = {name: array for name, array in its.items() if name != "params"}
            sums = message[4:].view(np.float64)
            answer = self._shard.push(grad, its["params"], worker, first, second, moments, sums)()
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
        assert self._ledger is not None  # workers ask only the rank with the ledger
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
