"""What Open MPI's launcher says on standard error without cause, taken out of what a program says."""

from __future__ import annotations

import os
import re
import threading
from typing import IO

# PRRTE puts the process that it starts on a host into a process group of its own twice, from both sides, and warns when
# the process was the quicker one. Its message is written in one piece.
_HARMLESS = re.compile(rb"\[[^\]\n]*\] plm:ssh: Warning: setpgid\(\d+,\d+\) failed in parent with errno=[^\n]*\n\n?")


def without_noise(text: bytes) -> bytes:
    """``text`` without the warnings that mean nothing."""
    return _HARMLESS.sub(b"", text)


def copy(source: IO[bytes], target: int) -> threading.Thread:
    """Copy ``source`` to the file descriptor ``target`` as it comes, without noise; the thread that does it."""

    def work() -> None:
        heard = True
        while piece := source.read1(65536):  # type: ignore[attr-defined]
            try:
                if heard:
                    _write(target, without_noise(piece))
            except OSError:  # whoever read our errors has left; the program must not wait for us
                heard = False

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _write(target: int, piece: bytes) -> None:
    while piece:
        piece = piece[os.write(target, piece) :]
