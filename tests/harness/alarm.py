"""An alarm that ends the whole job when a test hangs: a rank stuck in a collective can be saved in no other way."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from typing import Any

# Ranks that hang together ring together; each gets this long to say where it stands before the first one aborts.
LAST_WORDS_S = 1.0
# A rank that holds the interpreter lock cannot ring; then the operating system's thread of faulthandler ends it.
BACKSTOP_S = 5.0


class Alarm:
    """Prints the stacks of all threads and aborts, if it is not cleared in time.

    The alarm is a thread, not a signal: Python runs signal handlers between two instructions of the main thread, and
    that one sits inside MPI.
    """

    def __init__(self, comm: Any, stderr: int):
        self._comm, self._stream = comm, os.fdopen(os.dup(stderr), "w")
        self._timer: threading.Timer | None = None
        self.rank = f"[rank {comm.rank}/{comm.size}]"

    def set(self, limit_s: float, what: str, news: Callable[[], str] = str) -> None:
        """Ring in ``limit_s`` seconds; ``news()`` is what this rank has to tell about ``what`` by then."""
        self.clear()
        said = f"{self.rank} {what}: no end within {limit_s:g} s"
        self._timer = threading.Timer(limit_s, lambda: self.ring(said, news()))
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(limit_s + BACKSTOP_S, exit=True, file=self._stream)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            faulthandler.cancel_dump_traceback_later()

    def ring(self, said: str, news: str = "") -> None:
        """Say why, show where every thread stands, and end all ranks."""
        print(f"\n{said}; the job ends.\n{news}", file=self._stream, flush=True)
        faulthandler.dump_traceback(self._stream, all_threads=True)
        time.sleep(LAST_WORDS_S)
        if self._comm.size > 1:
            self._comm.Abort(1)
        os._exit(1)
