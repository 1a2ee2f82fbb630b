"""Overlap as measured by a training run: a few steps without overlap, compared with the steps that have it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from mpiddl.strategies.synchronous.overlap_schedule import Overlap, ideal, lengths

MEASURED = range(1, 4)
"""Steps without overlap. Step 0 is left out because it opens connections."""

KEPT = 1000
"""Number of the newest steps whose times are kept."""


class Hidden:
    """The timelines of one rank's steps, on the clock ``now`` (s); each begins with the first complete bucket.

    Attributes
    ----------
    measuring : bool
        True in steps without overlap, whose buckets start when the gradient is complete.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._step = now, 0
        self._ready: list[tuple[float, int]] = []
        self._computed = 0.0
        self._alone: list[tuple[list[float], float, float]] = []
        self._sizes: list[int] = []
        self._steps: deque[float] = deque(maxlen=KEPT)

    @property
    def measuring(self) -> bool:
        return self._step in MEASURED

    def ready(self, size: int) -> None:
        """A bucket of ``size`` elements is complete."""
        self._ready.append((self._now(), size))

    def computed(self) -> None:
        """The gradient is complete."""
        self._computed = self._now()

    def over(self) -> None:
        """The sum is complete."""
        end, times = self._now(), [at for at, _ in self._ready] or [self._computed]
        if self.measuring:
            self._sizes = [size for _, size in self._ready]
            self._alone.append(([at - times[0] for at in times], self._computed - times[0], end - self._computed))
        elif self._step:
            self._steps.append(end - times[0])
        self._ready.clear()
        self._step += 1

    def overlap(self) -> Overlap | None:
        """Medians over the steps, from the first complete bucket to the sum; None if there were too few steps."""
        if not self._alone or not self._steps:
            return None
        times, computing, seconds = zip(*self._alone, strict=True)
        ready, wire = [median(at) for at in zip(*times, strict=True)], median(seconds)
        best = ideal(ready, lengths(wire, self._sizes), median(computing))
        return Overlap(median(computing), wire, best, median(self._steps))

    def summary(self) -> dict[str, Any] | None:
        """The overlap in milliseconds, for the summary of the run."""
        found = self.overlap()
        return found and {
            "communication_ms": round(found.communication * 1e3, 3),
            "could_be_hidden_ms": round(found.allowed * 1e3, 3),
            "was_hidden_ms": round(found.reached * 1e3, 3),
        }
