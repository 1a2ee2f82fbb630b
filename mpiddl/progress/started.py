"""Operations under way: a collective that was started, and is advanced until it is over.

A collective is written as a generator that *yields what it waits for*: receives, sends, meetings of a node's ranks. Whoever
drives it decides how to wait. `Started.Wait` blocks, `Started.Test` goes on as far as it can and returns, and a
progress thread (`mpiddl.progress.thread`) does that while the main thread computes. So each algorithm is written once.

::

                 a request is not complete: asked again later
                 +----------------+
                 v                |
    start --> RUNNING ------------+
                 |  |
       last step |  | a step raises; the library raises; a second exception
            done |  | of a signal's handler; `give_up`
                 v  v
              DONE  FAILED (``failure``; except for `give_up`, the communicator is broken)
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

from mpiddl.errors import CommError
from mpiddl.machine.backoff import poll
from mpiddl.transport.base import Request
from mpiddl.transport.comm import Comm, CommRequest
from mpiddl.transport.meter import booked

Steps = Iterator[Request]


class State(Enum):
    """Of a started operation."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


RUNNING, DONE, FAILED = State

LONGEST_SLEEP_S = 2e-4
"""Of a thread beside the main one, between two looks at a message."""


class Started:
    """A collective under way on this rank; a request like those of `mpiddl.transport`.

    Other ranks wait for this one's part: ``Test`` (or `mpiddl.progress.thread`) advances it between ``start`` and ``Wait``.

    An exception that comes in while ``Wait`` waits, for this one or moving others on, from a signal's handler, is held back
    until it is over, as calls of MPI do it; out of ``Test`` it comes at once, and nothing is lost. One that comes inside a
    step ends a collective, as do a second one and what the library raises. Then the communicator is ``broken``: the ranks
    disagree on what was sent, and no further collective is begun on it.
    """

    def __init__(self, comm: Comm, wires: tuple[Any, ...], steps: Steps, queue: Queue | None = None, blocking: bool = False):
        self._comm, self._wires, self._steps, self._queue = comm, wires, steps, queue
        self._lock = threading.Lock()  # a progress thread may test while the main thread waits
        self._pending: Request | None = None
        self._arrived = comm.now()
        self._entered = self._arrived if blocking else None  # since when this rank only waits for the result
        self.state: State = RUNNING
        self._then: list[Callable[[], None]] = []
        self._beside = comm.started
        self.failure: BaseException | None = None
        self._held, comm.held = comm.held, None
        # First as far as it goes, then known to others: a progress thread must not draw its tag, later than a next one's.
        with self._lock:
            self._drive_on()
            if self.state is RUNNING:
                self._beside.append(self)
        if not blocking:
            comm.meter.moving += comm.now() - self._arrived

    def Wait(self) -> None:
        if self._entered is None:
            self._entered = self._comm.now()
        if self._comm.freed:
            self.give_up("its communicator was freed")
        wait = _wait if threading.current_thread() is threading.main_thread() else _wait_asleep
        while not self.over:
            try:
                while not self.over and any(other is not self for other in self._beside):
                    self._all_go_on()
                    os.sched_yield()
                with self._lock:
                    self._drive(wait)
            except BaseException as error:
                with self._lock:
                    self._hold_back(error)
        self.check()

    def Test(self) -> bool:
        """Go on as far as is possible without waiting; returns whether that was the end."""
        with booked(self._comm, "moving"):
            self._all_go_on()
        self.check()
        return self.over

    def check(self) -> None:
        """Raise what it failed with, or what was held back, once."""
        error, self._held = self.failure or self._held, None
        if error is not None:
            raise error

    def then(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once it is over, by whoever brings it to its end; at once if it is."""
        with self._lock:
            over = self.state is not RUNNING
            if not over:
                self._then.append(call)
        if over:
            call()

    @property
    def of(self) -> Any:
        """The communicator it was started on."""
        return self._comm

    @property
    def over(self) -> bool:
        """Whether it has come to its end; a look, which moves nothing on."""
        return self.state is not RUNNING

    @property
    def idle(self) -> bool:
        """Nobody is moving it on just now."""
        return not self._lock.locked()

    def give_up(self, why: str) -> None:
        """Its memory or communicator goes: it fails, and is not moved on again."""
        if self._lock.acquire(blocking=False):
            try:
                if self.state is RUNNING:
                    self.failure = CommError(f"request: {why} while it was under way; expected Wait() before")
                    self._finish()
            finally:
                self._lock.release()

    def _all_go_on(self) -> None:
        """This one and what else this rank has started: another rank may wait for our part of that first."""
        for started in list(self._beside):
            started.move_on()

    def move_on(self) -> None:
        """As far as it goes without waiting, unless another thread is at it; what goes wrong with it is kept for `Wait`.

        What a signal's handler raises meanwhile is the caller's: whoever waits for this one may do so in the library, unasked.
        """
        if self._comm.freed:
            self.give_up("its communicator was freed")
        if self._lock.acquire(blocking=False):
            try:
                self._drive(_test)
            finally:
                self._lock.release()

    def _drive(self, is_there: Callable[[Request], bool]) -> None:
        stepping = False
        try:
            while self.state is RUNNING:
                if self._pending is None:
                    stepping = True
                    self._pending = next(self._steps, None)
                    stepping = False
                if self._pending is None:
                    self._finish()
                elif not is_there(self._pending):
                    break
                self._pending = None
        except BaseException as error:
            if not (self.over or stepping) and getattr(self._pending, "failure", None) is None:
                raise  # what is waited for can be asked again, and the next step is not begun
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _drive_on(self) -> None:
        """As far as it goes without waiting; what a signal's handler raises is held back."""
        try:
            self._drive(_test)
        except BaseException as error:
            self._hold_back(error)

    def _hold_back(self, error: BaseException) -> None:
        """Keep it until this rank has waited for the result; a second one ends that."""
        if self.state is not RUNNING or self._held is None:
            self._held = self._held or error
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        if self.state is RUNNING:
            self._comm.broken = True
            self._finish()

    def _finish(self) -> None:
        """Count how long it took, and all that has been sent so far: of others on the same wire, too, but once."""
        self.state = DONE if self.failure is None else FAILED
        if self in self._beside:
            self._beside.remove(self)
        for wire in self._wires:
            nbytes, messages = wire.meter.bytes, wire.meter.messages
            wire.meter.sent(-nbytes, -messages)
            self._comm.meter.sent(nbytes, messages)
        left = self._comm.now()
        self._comm.meter.synchronised(self._arrived, left if self._entered is None else self._entered, left)
        while self._then:
            self._then.pop(0)()


def go_on(comm: Comm, several: Sequence[Started]) -> None:
    """Move several on as far as they go without waiting; a single call of the MPI library asks for all of them.

    So many Python steps a request are spared that a thread can do it thousands of times a second.
    """
    for started in several:
        if started._comm.freed:
            started.move_on()
    held = [started for started in several if started.state is RUNNING and started._lock.acquire(blocking=False)]
    try:
        # Held to the end: what the library has once called complete it never names again.
        for started, done in zip(held, comm.test_some([started._pending for started in held]), strict=True):
            if done:
                started._drive_on()
    finally:
        for started in held:
            started._lock.release()


def _wait(request: Request) -> bool:
    request.Wait()
    return True


def _wait_asleep(request: Request) -> bool:
    """For a thread beside the main one: that one has the core between two looks at a message."""
    if isinstance(request, CommRequest) and request.processes:
        return poll(request.Test, math.inf, LONGEST_SLEEP_S)
    return _wait(request)


def _test(request: Request) -> bool:
    """Of a collective that waits for another: that one is only looked at. Whoever asks has them all go on, each once; if each
    had all others go on again, some dozens would take for ever."""
    if isinstance(request, Started):
        request.check()
        return request.over
    return request.Test()


def run(comm: Comm, wires: tuple[Any, ...], steps: Steps, blocking: bool, queue: Queue | None = None) -> Started:
    """Drive a collective to its end, or to where it first has to wait; after those before it in ``queue``."""
    if queue is not None:
        steps = _after(queue.last, steps)
    try:
        started = Started(comm, wires, steps, queue, blocking)
    except BaseException:
        comm.broken = True
        raise
    if queue is not None:
        queue.last = started
    started.Wait() if blocking else started.check()
    return started


class Queue:
    """Collectives that use the same memory, one after the other; ``last`` is the one that was started last."""

    last: Started | None = None

    def give_up(self, why: str) -> None:
        """The memory goes: what is under way in it fails."""
        for started in list(self.last._beside) if self.last is not None else ():
            if started._queue is self:
                started.give_up(why)


def _after(before: Started | None, steps: Steps) -> Steps:
    """Waits for ``before``, and drives it on while it does: nobody else may."""
    if before is not None:
        yield before
    yield from steps
