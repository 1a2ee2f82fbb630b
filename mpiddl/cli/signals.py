"""What signals do to a command that has something to take down."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn


def end_on_signals() -> None:
    """SIGTERM and SIGHUP end the command as Ctrl-C does: whatever blocks it is in are left."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
