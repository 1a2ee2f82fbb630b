"""Operations of a process group as torch's `Work`, and the queue that runs them in the order of issue.

A collective runs whenever a thread has the queue's turn: a worker thread for ``async_op=True``, else the caller itself, which
spares the switch between threads. Only one thread has the turn, so that all ranks come to collectives in one order. Operations
also end in that order. A future's callbacks run after the turn was given up: they may issue collectives and wait for them, as
PowerSGD's do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpiddl.errors import CommError
from mpiddl.machine.clock import now

NO_TIMEOUT = timedelta(0)

_kept: set[Work] | None = set() if torch.__version__ < (2, 13) else None
"""Operations that are not over, for older versions of torch, such as 2.5. Their C++ code keeps no Python object alive: an
operation that only C++ uses would be deleted, and `wait` in C++ would never return."""


class Work(dist._Work):
    """One operation. Once it is over, ``result()`` has the tensors that it filled, and ``exception()`` what it failed with.

    Attributes
    ----------
    name : str
        In messages: ``allreduce``.
    sequence : int
        The number of the operation in its group; the same on all ranks for collectives.
    """

    def __init__(self, name: str, tensors: Any, sequence: int = 0, source: int = -1):
        super().__init__()
        self.name, self.sequence = name, sequence
        self._tensors, self._source = tensors, source
        self._lock = threading.Lock()
        self._over = self._completed = False
        self._error: BaseException | None = None
        self._event: threading.Event | None = None
        self._future: torch.futures.Future[Any] | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """It is over. Callbacks of its future run in here."""
        self.end(error)
        self.call_back()

    def end(self, error: BaseException | None = None) -> None:
        """Let `wait` return; the future is not complete yet."""
        with self._lock:
            self._error, self._over = error, True
            event = self._event
        if event is not None:
            event.set()

    def call_back(self) -> None:
        """Complete the future once, if the caller has asked for it; callbacks run in here."""
        with self._lock:
            future, self._completed = None if self._completed else self._future, True
        if future is not None:
            self._complete(future)
            if _kept is not None:
                _kept.discard(self)

    def _complete(self, future: Any) -> None:
        if self._error is None:
            future.set_result(self._tensors)
        else:
            error = self._error
            future.set_exception(error if isinstance(error, Exception) else CommError(f"{self.name}: {error!r}"))

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Until it is over; raises what it failed with.

        Raises
        ------
        CommError
            It was not over after ``timeout``, if that is not 0.
        """
        if not self._over:
            self.advance(limited=timeout.total_seconds() > 0)
        if not self._over:
            with self._lock:
                self._event = self._event or threading.Event()
                if self._over:
                    self._event.set()
            if not self._event.wait(timeout.total_seconds() or None):
                raise CommError(f"{self.name}: got no result in {timeout.total_seconds():g} s, expected the call on every "
                                "rank of the group")
        if _kept is not None:
            _kept.discard(self)
        if self._error is not None:
            raise self._error
        return True

    def advance(self, limited: bool = False) -> None:
        """Do what this thread can do for it; nothing that may last where the wait is ``limited``."""

    @property
    def has_future(self) -> bool:
        return self._future is not None

    def is_completed(self) -> bool:
        return self._over

    def is_success(self) -> bool:
        return self._over and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """Of a receive from any source: the rank in the group that has sent."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with ``result()``. Its callbacks run in the thread that ends the operation."""
        with self._lock:
            made = self._future is None
            if self._future is None:
                self._future = torch.futures.Future()
            completed = self._completed
        if made and completed:
            self._complete(self._future)
        return self._future


class Job(Work):
    """A `Work` of a queue: ``call()`` does it, in whatever thread has the turn.

    ``patient``: it looks at the clock by itself, and raises where others end the job.
    """

    def __init__(self, queue: Queue, call: Callable[[], None], name: str, tensors: Any, sequence: int):
        super().__init__(name, tensors, sequence)
        self._queue, self._call = queue, call
        self.began, self.patient = 0.0, False
        if _kept is not None:
            _kept.add(self)

    def run(self) -> None:
        """Once; what goes wrong is kept for `Work.wait`."""
        failure: BaseException | None = None
        self.began = now()
        try:
            self._call()
        except MPI.Exception as error:
            own = ", ".join(_shape(each) for each in self._tensors if isinstance(each, torch.Tensor))
            failure = CommError(f"{self.name}: got {error.Get_error_string()!r} from MPI, with {own or 'no tensor'} on this "
                                "rank, expected the same on every rank; TORCH_DISTRIBUTED_DEBUG=DETAIL compares them")
            failure.__cause__ = error
        except BaseException as error:
            failure = error
        del self._call  # and the tensors that it holds
        self.end(failure)

    def advance(self, limited: bool = False) -> None:
        self._queue.go_on(until=self, here=not limited)


class Queue:
    """The collectives of one group, in the order of issue.

    Attributes
    ----------
    completed : int
        The number of the last collective that is over here.
    running : Job or None
        What is under way; others look at it from time to time (`mpiddl.torch.process_group_watch`).
    """

    def __init__(self, name: str, threads: bool = True):
        self._name, self._threads = name, threads
        self._jobs: deque[Job] = deque()
        self._turn = threading.Lock()
        self._news = threading.Condition()
        self._idle, self._called, self._ended = 0, 0, False
        self.running: Job | None = None
        self.sequence = self.completed = 0

    def put(self, call: Callable[[], None], name: str, tensors: Any, asynchronous: bool) -> Job:
        """Issue an operation. If it is not ``asynchronous``, it begins when its `Work.wait` is called, at the latest."""
        self.sequence += 1
        job = Job(self, call, name, tensors, self.sequence)
        self._jobs.append(job)
        if self._threads and asynchronous:
            self._wake()
        else:
            self.go_on(until=job)
        return job

    def go_on(self, until: Job | None = None, here: bool = True) -> None:
        """Run what is there, unless another thread does; no further than ``until``. Not ``here``: a worker does.

        The thread with the turn looks again after it has given it up, so no job is left behind.
        """
        while (here or not self._threads) and self._jobs and not (until is not None and until.is_completed()):
            if not self._turn.acquire(blocking=False):
                return
            try:
                job = self.running = self._jobs.popleft() if self._jobs else None
                if job is not None:
                    job.run()
                    self.completed = job.sequence
            finally:
                self.running = None
                self._turn.release()
            if job is not None:
                if job.has_future:
                    self._wake()  # callbacks may wait for what is next
                job.call_back()
        self._wake()

    def _wake(self) -> None:
        """Have a worker run what is left, unless a thread has the turn, which looks for itself when it gives it up.

        A worker that sleeps, else a new one: all there are may be in callbacks.
        """
        if not (self._jobs and self._threads) or self._turn.locked():
            return
        with self._news:
            if self._called < self._idle:
                self._called += 1
                self._news.notify()
            elif self._idle == 0:
                threading.Thread(target=self._work, name=f"mpiddl {self._name}", daemon=True).start()

    def _work(self) -> None:
        while True:
            self.go_on()
            with self._news:
                self._idle += 1
                while not (self._called or self._ended):
                    self._news.wait()
                self._idle -= 1
                if self._ended and not self._called:
                    return
                self._called -= 1

    def drain(self) -> None:
        """Until all that was issued is over."""
        last = self._jobs[-1] if self._jobs else self.running
        if last is not None:
            last.wait()

    def end(self) -> None:
        """Idle worker threads end."""
        with self._news:
            self._ended = True
            self._news.notify_all()


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def done(name: str, tensors: Sequence[torch.Tensor] | Any) -> Work:
    """An operation that is over."""
    work = Work(name, tensors)
    work.finish()
    return work
