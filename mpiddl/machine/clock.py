"""One monotonic clock, and how often something short is timed."""

from __future__ import annotations

import time
from collections.abc import Sequence

now = time.perf_counter

REPEATS, MOST_REPEATS, REPEATS_S = 3, 20, 0.25
"""Repetitions of a measurement, after a first one that is not counted. What is short is repeated more often, up to so many
seconds: single times differ by chance."""


def enough(taken: Sequence[float], alike: bool = False) -> bool:
    """Whether these times are enough. ``alike``: they do not differ by chance, as in simulated time.

    Examples
    --------
    >>> enough([0.1] * 3), enough([0.1] * 4), enough([0.01] * 20), enough([0.01] * 21), enough([0.01] * 4, alike=True)
    (False, True, False, True, True)
    """
    return len(taken) > REPEATS and (alike or len(taken) > MOST_REPEATS or sum(taken) >= REPEATS_S)
