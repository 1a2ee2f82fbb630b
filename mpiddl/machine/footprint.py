"""How much memory this process takes that no file stands for: what would not fit if it were too much."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

INTERVAL = 0.05
"""Seconds between two looks."""


def footprint() -> int:
    """Bytes of this process in memory, anonymous and shared (RssAnon + RssShmem); 0 where the system does not tell."""
    total = 0
    with suppress(OSError):
        for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += 1024 * int(line.split()[1])
    return total


class Peak:
    """A context in which the largest `footprint` is found; ``bytes`` has it."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = Event()
        self._thread = Thread(target=self._watch, name="mpiddl-footprint", daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.bytes, footprint())

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.bytes = max(self.bytes, footprint())
