"""Shards and ledger on another node: a thread of the serving rank executes the requests of the workers.

A worker sends a short request and gets a short answer. With a push comes the gradient, with the answer to a pull the
parameters: V bytes out and V bytes back per step, as with a two-sided server. They travel as messages
(`mpiddl.strategies.server.message_lines`), or where RDMA verbs work by one-sided writes and reads
(`mpiddl.strategies.server.memory_lines`). The thread works while its rank computes, because compiled kernels and numpy release
the interpreter lock. It polls without sleep while messages are in flight, because both MPI libraries advance messages over TCP
only inside their calls; otherwise it sleeps between two polls. It serves several workers in turn.

Cost: for each worker on another node, a serving rank keeps a copy of the pulled parameters, a buffer for a gradient, and the
worker's moments if it has its own. Needs `MPI_THREAD_MULTIPLE`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from mpiddl.errors import CommError
from mpiddl.machine.clock import now
from mpiddl.strategies.server.push_ledger import Ledger
from mpiddl.strategies.server.shard import Shard

PUSH, PULL, ENTER, ARRIVE, DECIDED, LEAVE = range(6)
"""Requests: the first of their WORDS numbers. The others are the arguments of the function of this name. A PUSH has the result
of `Rule.layer_sums` behind them."""

WORDS = 4

SHORTEST_S, LONGEST_S = 0.0001, 0.001
"""Shortest and longest sleep between two polls; the sleep grows while there are no requests."""

LINGER_S = 1.0
"""Seconds that a stopping thread waits for messages in flight: after a failure no rank may receive them."""


class Line(Protocol):
    """The worker's side: requests to one server. It makes the next one when it has the answer to the last."""

    def start(self, *words: int, out: np.ndarray | None = None, into: np.ndarray | None = None,
              sums: np.ndarray | None = None) -> Callable[[], int]:
        """Send a request, with a gradient ``out``. Returns a function that waits for the answer and parameters ``into``."""
        ...

    def pull(self, into: np.ndarray) -> Callable[[], int]:
        """Get the parameters. Returns a function that waits for them; its result is the number of changes that they contain."""
        ...


class Requests(Protocol):
    """The server's side: requests of workers on other nodes."""

    def next(self) -> tuple[int, np.ndarray] | None:
        """The rank of a worker and its request, if one has come."""
        ...

    def params(self, worker: int, like: np.ndarray) -> np.ndarray:
        """A copy of ``like``, from where the worker gets it after a PULL."""
        ...

    def gradient(self, worker: int, like: np.ndarray) -> Generator[None, None, np.ndarray]:
        """That comes with a PUSH. Yields where it would wait."""
        ...

    def answer(self, worker: int, number: int, params: np.ndarray | None) -> Iterator[None]:
        """Send an answer, to a PULL with ``params``. Yields where it would wait."""
        ...

    def fail(self, error: BaseException) -> None:
        """This server cannot go on: end the job."""
        ...


def wait_for_answer(under_way: list[Any], server: int, limit_s: float) -> None:
    """Until all requests are complete; a `CommError` after ``limit_s`` seconds."""
    until = now() + limit_s
    while under_way := [request for request in under_way if not request.Test()]:
        os.sched_yield()
        if now() > until:
            raise CommError(f"rank {server} did not answer within {limit_s:g} s")


class RemoteShard:
    """A shard, as seen by a worker on another node; see `Shard`. The server holds this worker's copies and moments."""

    def __init__(self, line: Line):
        self._line = line

    def push(self, grad: np.ndarray, before: np.ndarray, worker: int, pulled: int, count: int,
             moments: dict[str, np.ndarray], sums: np.ndarray) -> Callable[[], int]:
        return self._line.start(PUSH, pulled, count, out=grad, sums=sums)

    def pull(self, into: np.ndarray) -> Callable[[], int]:
        return self._line.pull(into)


class RemoteLedger:
    """The ledger, as seen by a worker on another node; see `Ledger`."""

    def __init__(self, line: Line):
        self._line = line

    def enter(self, budget: int) -> bool:
        return bool(self._line.start(ENTER, budget)())

    def arrive(self, version: int, every: int, budget: int) -> int:
        return self._line.start(ARRIVE, version, every, budget)()

    def decided(self, number: int) -> int:
        return self._line.start(DECIDED, number)()

    def leave(self) -> None:
        self._line.start(LEAVE)()


class Desk:
    """The thread of a serving rank.

    Parameters
    ----------
    requests : Requests
    shard, ledger : Shard, Ledger
        Objects for this thread. Without a ledger there are no requests about it.
    workers : sequence of int
        Workers on other nodes.
    moments : dict of str to ndarray
        Initial moments of each worker, if workers have their own.
    saved : dict or None
        The value of the attribute ``saved``, for a resumed run.

    Attributes
    ----------
    saved : dict
        By rank of the worker: its pulled parameters and its moments, as views.
    """

    def __init__(self, requests: Requests, shard: Shard, ledger: Ledger | None, workers: Sequence[int],
                 moments: dict[str, np.ndarray], saved: dict[str, Any] | None):
        self._requests, self._shard, self._ledger = requests, shard, ledger
        fresh = {"params": shard.arrays["params"], **moments}
        begin = {str(worker): (saved or {}).get(str(worker), fresh) for worker in workers}
        self.saved = {worker: {name: requests.params(int(worker), array) if name == "params" else array.copy()
                               for name, array in its.items()} for worker, its in begin.items()}
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
            self._requests.fail(error)

    def _serve(self) -> None:
        busy: list[Iterator[None]] = []
        until, pause = float("inf"), SHORTEST_S
        while not self._end.is_set() or (busy and now() < until):
            if self._end.is_set():
                until = min(until, now() + LINGER_S)
            asked = self._requests.next()
            if asked:
                busy.append(self._answer(*asked))
            busy = [worker for worker in busy if next(worker, self) is None]
            pause = SHORTEST_S if busy or asked else min(pause * 1.1, LONGEST_S)
            if not busy:
                time.sleep(pause)

    def _answer(self, worker: int, message: np.ndarray) -> Iterator[None]:
        """Execute a request of ``worker``. Yields where it would wait for a message."""
        what, first, second, third = message[:WORDS].tolist()
        its = self.saved[str(worker)]
        if what == PUSH:
            grad = yield from self._requests.gradient(worker, its["params"])
            moments = {name: array for name, array in its.items() if name != "params"}
            sums = message[WORDS:].view(np.float64)
            answer = self._shard.push(grad, its["params"], worker, first, second, moments, sums)()
        elif what == PULL:
            answer = self._shard.pull(its["params"])()
        else:
            answer = self._booked(what, first, second, third)
        yield from self._requests.answer(worker, answer, its["params"] if what == PULL else None)

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
