"""Work in flight of one rank: whoever waits for one operation must advance the others, for which other ranks may wait first."""

from __future__ import annotations

from typing import Any


class InFlight(list[Any]):
    """The started collectives of a rank, on all its communicators (`mpiddl.progress.started.Started`)."""

    def move_on(self) -> None:
        """Advance each one as far as it goes without waiting."""
        for started in list(self):
            started.move_on()

    def idle(self) -> bool:
        """Whether there is one that no other thread advances just now."""
        return any(started.idle for started in self)
