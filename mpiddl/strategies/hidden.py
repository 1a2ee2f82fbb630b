"""What a training finds out about its own overlap: a few steps that hide nothing, and the seconds of those that do."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

from mpiddl.clock import now
from mpiddl.overlap import Overlap, ideal, lengths

MEASURED = range(1, 4)
"""Of a run's steps: the first one opens connections, these go without overlap."""

KEPT = 1000
"""Steps whose seconds are kept, the newest."""


class Hidden:
    """The timelines of one rank's steps, each from its first complete bucket on.

    Attributes
    ----------
    measuring : bool
        The step hides nothing: all buckets shall start when the gradient is complete.
    """

    def __init__(self) -> None:
        self._step = 0
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
        self._ready.append((now(), size))

    def computed(self) -> None:
        """The gradient is complete."""
        self._computed = now()

    def over(self) -> None:
        """So is the sum, and with it the step."""
        end, times = now(), [at for at, _ in self._ready] or [self._computed]
        if self.measuring:
            self._sizes = [size for _, size in self._ready]
            self._alone.append(([at - times[0] for at in times], self._computed - times[0], end - self._computed))
        elif self._step:
            self._steps.append(end - times[0])
        self._ready.clear()
        self._step += 1

    def overlap(self) -> Overlap | None:
        """Medians over the steps, from the first complete bucket to the sum; None where too few were taken."""
        if not self._alone or not self._steps:
            return None
        times, computing, seconds = zip(*self._alone, strict=True)
        ready, wire = [median(at) for at in zip(*times, strict=True)], median(seconds)
        best = ideal(ready, lengths(wire, self._sizes), median(computing))
        return Overlap(median(computing), wire, best, median(self._steps))

    def summary(self) -> dict[str, Any] | None:
        """Milliseconds of a step, for a person."""
        found = self.overlap()
        return found and {
            "communication_ms": round(found.communication * 1e3, 3),
            "could_be_hidden_ms": round(found.allowed * 1e3, 3),
            "was_hidden_ms": round(found.reached * 1e3, 3),
        }
