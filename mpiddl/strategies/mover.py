"""A progress thread for the requests of a strategy: created with the first request, ended by `stop` or by its owner."""

from __future__ import annotations

from mpiddl.collectives.base import Started
from mpiddl.collectives.progress import Progress
from mpiddl.errors import CommError
from mpiddl.transport.comm import Comm


class Mover:
    """Advances requests of ``comm``.

    trouble : the reason why there is no thread, or "". Without a thread the strategy must advance requests in its own calls.
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
        """Let the thread advance ``request``."""
        if not self.trouble:
            self._thread = self._thread or Progress(self._comm)
            self._thread.on(request)

    def rest(self) -> None:
        """Pause the thread while the caller waits for the requests itself: two pollers would delay each other."""
        if self._thread is not None:
            self._thread.rest()

    def wake(self) -> None:
        """Continue to advance the requests in flight."""
        if self._thread is not None:
            self._thread.wake()

    def stop(self) -> None:
        """Stop the thread. The next request starts a new one."""
        if self._thread is not None:
            self._thread.Free()
            self._thread = None
