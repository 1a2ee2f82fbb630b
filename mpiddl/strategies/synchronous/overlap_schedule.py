"""How much communication could be hidden behind computing, and how much was: arithmetic of a step's timeline.

A step computes, and on the way makes parts of a gradient; the exchange of a part (a bucket) can start when it is
complete. One wire carries one bucket at a time, in the order in which they are made. So the dependency graph allows
nothing faster than this schedule: each bucket begins when it is ready and the bucket before it is over, and the step
ends when computing and the last exchange are over.

    allowed = computing + communication - ideal          what could be hidden
    reached = computing + communication - step           what was
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Overlap(NamedTuple):
    """Seconds of a step.

    computing : of a step that exchanges nothing.
    communication : of its exchanges when nothing is computed.
    ideal : of the step, as the dependency graph allows it.
    step : as it was.
    """

    computing: float
    communication: float
    ideal: float
    step: float

    @property
    def allowed(self) -> float:
        """Seconds of communication that could be hidden."""
        return self.computing + self.communication - self.ideal

    @property
    def reached(self) -> float:
        """Seconds that were."""
        return self.computing + self.communication - self.step

    @property
    def share(self) -> float:
        """Reached over allowed; 1 where nothing could be hidden."""
        return self.reached / self.allowed if self.allowed > 0 else 1.0


def schedule(ready: Sequence[float], seconds: Sequence[float]) -> list[tuple[float, float]]:
    """When each bucket's exchange begins and ends on one wire: after it is ready, and after the bucket before it.

    Examples
    --------
    >>> schedule([1, 2, 6], [3, 1, 1])
    [(1, 4), (4, 5), (6, 7)]
    """
    spans: list[tuple[float, float]] = []
    for at, length in zip(ready, seconds, strict=True):
        begin = max(at, spans[-1][1]) if spans else at
        spans.append((begin, begin + length))
    return spans


def ideal(ready: Sequence[float], seconds: Sequence[float], computed: float, after: float = 0.0) -> float:
    """The end of a step whose gradient is computed at ``computed``, and which has ``after`` to do with the sum.

    Examples
    --------
    >>> ideal([1, 2, 6], [3, 1, 1], 6)
    7.0
    >>> ideal([1, 2], [1, 1], 6, 2)
    8
    """
    spans = schedule(ready, seconds)
    return max(computed, spans[-1][1] if spans else computed) + after


def lengths(seconds: float, sizes: Sequence[int]) -> list[float]:
    """Of ``seconds`` in which a wire carried all buckets, each one's part: by its size.

    Not by when each was over: they are under way together, and end together.

    Examples
    --------
    >>> lengths(6, [10, 20, 30])
    [1.0, 2.0, 3.0]
    """
    return [seconds * size / sum(sizes) for size in sizes]
