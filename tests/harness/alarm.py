"""An alarm that ends the whole job when a test hangs: a rank stuck in MPI can be helped no other way."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

# Ranks that hang together ring together; each has this long to say where it stands before one aborts.
LAST_WORDS_S = 3.0
# A rank that holds the interpreter lock cannot ring; faulthandler's thread, which needs no lock, ends it.
BACKSTOP_S = 10.0


class Alarm:
    """Prints the stacks of all threads and aborts, if it is not cleared in time.

    The alarm is a thread, not a signal: Python runs signal handlers between two instructions of the main
    thread, and that one sits inside MPI.
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
        stacks = [f"{self.rank} {stack}" for stack in _stacks()]
        print("\n".join(["", f"{said}; the job ends.", news, *stacks]), file=self._stream, flush=True)
        time.sleep(LAST_WORDS_S)
        if self._comm.size > 1:
            self._comm.Abort(1)
        os._exit(1)


def _stacks() -> list[str]:
    """Where every thread but this one stands, without the frames of pytest that led there."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    names.pop(threading.get_ident(), None)
    return [_stack(names[ident], frame) for ident, frame in sys._current_frames().items() if ident in names]


def _stack(name: str, frame: Any) -> str:
    lines = traceback.format_stack(frame)
    runner = [index for index, line in enumerate(lines) if "/_pytest/" in line or "/pluggy/" in line]
    return f"{name} stands at\n{''.join(lines[runner[-1] + 1 if runner else 0 :])}"
