"""A thread that moves started collectives on while the main thread computes.

Compiled kernels and numpy give up the interpreter lock, so the thread gets its turns. It needs an MPI that takes calls
from several threads (MPI_THREAD_MULTIPLE), which mpiddl asks for; where the library grants less, there is no thread.
Both libraries move messages over TCP inside their calls only, and those that wait keep a core busy: so it tests, and
sleeps between two rounds of tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpiddl.errors import CommError
from mpiddl.progress.started import Started, go_on
from mpiddl.transport.comm import Comm

PAUSE_S = 0.0002
"""Between two rounds of tests: a wire at 1 Gbit/s moves 25 kB in it, less than a segment."""


class Progress:
    """Looks after what this rank has started, by a thread that begins with the first request and ends with `Free`.

    Attributes
    ----------
    trouble : str
        The reason why there can be no thread, or "": the MPI library does not take calls from several threads. The same on
        every rank. A program must then advance what it has started in its own calls.

    Examples
    --------
    ::

        with progress(comm) as moving:
            total = moving.on(iallreduce(comm, grad, summed))
            ...                                     # compute
            total.Wait()
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._news = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended, self.trouble = False, ""
        try:
            comm.check_threads()
        except CommError as error:
            self.trouble = str(error)

    def on(self, request: Started) -> Started:
        """Look after ``request``, and whatever else this rank has started, until all is complete; returns it."""
        self.begin()
        return request

    def begin(self) -> None:
        """Look after what this rank has started, if there is anything."""
        if self._thread is None and not self.trouble:
            self._ended = False
            self._thread = threading.Thread(target=self._run, name="mpiddl progress", daemon=True)
            self._thread.start()
        self._news.set()

    def rest(self) -> None:
        """Leave what is under way to the caller, who waits for it: two that ask would hold each other up."""
        self._news.clear()

    def wake(self) -> None:
        """Go on after a `rest`."""
        self._news.set()

    def _run(self) -> None:
        while True:
            self._news.wait()
            if self._ended:
                return
            go_on(self._comm, list(self._comm.started))  # all there are: another rank may wait for our part of those first
            if not self._comm.started:
                self._news.clear()
                if self._comm.started or self._ended:  # one came, or the end did, between the look and the clearing
                    self._news.set()
            time.sleep(PAUSE_S)

    def Free(self) -> None:
        """End the thread. Operations under way stay under way. The next request starts a new thread."""
        thread, self._thread, self._ended = self._thread, None, True
        self._news.set()
        if thread is not None:
            thread.join()


@contextmanager
def progress(comm: Comm) -> Iterator[Progress]:
    """A progress thread while the block runs.

    Raises
    ------
    CommError
        If the MPI library does not take calls from several threads; the same on every rank.
    """
    comm.check_threads()
    moving = Progress(comm)
    try:
        yield moving
    finally:
        moving.Free()
