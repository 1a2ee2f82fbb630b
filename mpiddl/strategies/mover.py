"""A progress thread for what a strategy has started: made with the first request, ended by `stop`, or by what owns it."""

from __future__ import annotations

from mpiddl.collectives.base import Started
from mpiddl.collectives.progress import Progress
from mpiddl.errors import CommError
from mpiddl.transport.base import Comm


class Mover:
    """Moves requests of ``comm`` on.

    trouble : why no thread can, or nothing; then a strategy has to do it in its calls.
    """

    def __init__(self, comm: Comm):
        self._comm = comm
        self._thread: Progress | None = None
        self.trouble = ""
        try:
            comm.check_threads()
        except CommError as error:
            self.trouble = str(error)

    def on(self, request: Started) -> None:
        """Look after ``request``, if a thread can."""
        if not self.trouble:
            self._thread = self._thread or Progress(self._comm)
            self._thread.on(request)

    def rest(self) -> None:
        """Leave what is under way to the caller, who waits for it: two that ask would hold each other up."""
        if self._thread is not None:
            self._thread.rest()

    def wake(self) -> None:
        """Look after what is under way again."""
        if self._thread is not None:
            self._thread.wake()

    def stop(self) -> None:
        """End the thread; the next request would start another."""
        if self._thread is not None:
            self._thread.Free()
            self._thread = None
