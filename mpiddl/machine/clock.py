"""Seconds by phase: one monotonic clock, and a stopwatch that adds up where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

now = time.perf_counter


@dataclass
class Stopwatch:
    """Adds up seconds under names; `phase` is a context manager."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        entered = now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + now() - entered
