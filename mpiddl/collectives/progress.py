"""A thread that moves started collectives on while the main thread computes.

Compiled kernels and numpy give up the interpreter lock, so the thread gets its turns. It needs an MPI that takes calls
from several threads (MPI_THREAD_MULTIPLE), which mpiddl asks for; where the library grants less, `Progress` refuses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpiddl.collectives.base import Started
from mpiddl.transport.base import Comm

PAUSE_S = 0.0002
"""Between two rounds of tests: a wire at 1 Gbit/s moves 25 kB in it, less than a segment."""


class Progress:
    """Requests that are looked after; `progress` makes one.

    Examples
    --------
    ::

        with progress(comm) as moving:
            total = moving.on(iallreduce(comm, grad, summed))
            ...                                     # compute
            total.Wait()
    """

    def __init__(self) -> None:
        self._requests: list[Started] = []
        self._news = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="mpiddl progress", daemon=True)
        self._thread.start()

    def on(self, request: Started) -> Started:
        """Look after ``request`` until it is complete; returns it."""
        self._requests.append(request)
        self._news.set()
        return request

    def _run(self) -> None:
        while not self._over:
            self._news.wait()
            for request in list(self._requests):
                if _over(request):
                    self._requests.remove(request)
            if not self._requests:
                self._news.clear()
                if self._requests:  # one came between the look and the clearing
                    self._news.set()
            time.sleep(PAUSE_S)

    def stop(self) -> None:
        """End the thread; what is under way stays so."""
        self._over = True
        self._news.set()
        self._thread.join()


def _over(request: Started) -> bool:
    """Whether a request needs no more care; it keeps a failure for whoever waits for it."""
    try:
        return request.Test()
    except BaseException:
        return True


@contextmanager
def progress(comm: Comm) -> Iterator[Progress]:
    """A progress thread while the block runs.

    Raises
    ------
    CommError
        If the MPI library does not take calls from several threads; the same on every rank.
    """
    comm.check_threads()
    moving = Progress()
    try:
        yield moving
    finally:
        moving.stop()
