"""A thread that moves started collectives on while the main thread computes.

Compiled kernels and numpy give up the interpreter lock, so the thread gets its turns. It needs an MPI that takes calls
from several threads (MPI_THREAD_MULTIPLE), which mpiddl asks for; where the library grants less, `progress` refuses.
Both libraries move messages over TCP inside their calls only, and those that wait keep a core busy: so it tests, and
sleeps between two rounds of tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpiddl.collectives.base import Started, go_on
from mpiddl.transport.comm import Comm

PAUSE_S = 0.0002
"""Between two rounds of tests: a wire at 1 Gbit/s moves 25 kB in it, less than a segment."""


class Progress:
    """Requests that are looked after; `progress` makes one for the length of a block. Whoever makes one calls `Free`.

    Parameters
    ----------
    comm : Comm
        Of which, and of whose kin, requests come.

    Raises
    ------
    CommError
        If the MPI library does not take calls from several threads; the same on every rank.

    Examples
    --------
    ::

        with progress(comm) as moving:
            total = moving.on(iallreduce(comm, grad, summed))
            ...                                     # compute
            total.Wait()
    """

    def __init__(self, comm: Comm) -> None:
        comm.check_threads()
        self._comm = comm
        self._news = threading.Event()
        self.freed = False
        self._thread = threading.Thread(target=self._run, name="mpiddl progress", daemon=True)
        self._thread.start()

    def on(self, request: Started) -> Started:
        """Look after ``request``, and whatever else this rank has started, until all is complete; returns it."""
        self.wake()
        return request

    def wake(self) -> None:
        """Look after what this rank has started, if there is anything."""
        self._news.set()

    def rest(self) -> None:
        """Leave what is under way to the caller, who waits for it: two that ask would hold each other up."""
        self._news.clear()

    def _run(self) -> None:
        while True:
            self._news.wait()
            if self.freed:
                return
            go_on(self._comm, list(self._comm.started))  # all there are: another rank may wait for our part of those first
            if not self._comm.started:
                self._news.clear()
                if self._comm.started or self.freed:  # one came, or the end did, between the look and the clearing
                    self._news.set()
            time.sleep(PAUSE_S)

    def Free(self) -> None:
        """End the thread; what is under way stays so."""
        self.freed = True
        self._news.set()
        self._thread.join()


@contextmanager
def progress(comm: Comm) -> Iterator[Progress]:
    """A progress thread while the block runs.

    Raises
    ------
    CommError
        If the MPI library does not take calls from several threads; the same on every rank.
    """
    moving = Progress(comm)
    try:
        yield moving
    finally:
        moving.Free()
