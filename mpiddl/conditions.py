"""Conditions that a run is put under: ranks that compute slower than others, and steps that vary.

The same in every run with the same seed: what a step takes depends on the seed, the rank and the step's number alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from mpiddl.data.draws import generator
from mpiddl.errors import UsageError

JITTER = 18
"""Purpose of the generator that draws them (`mpiddl.data.draws`)."""

Pace = Callable[[int, float], None]
"""``pace(index, seconds)``: step ``index`` has been computed in so long; returns when it would be over."""


class Conditions:
    """What computing takes more than it would.

    Parameters
    ----------
    slow : mapping of int to float
        By rank, how many times as long its steps take; 1 where none is given.
    jitter : float
        Mean of a share by which each step takes longer: it is drawn uniformly from 0 to twice that.
    seed : int
        Of the draws.

    Examples
    --------
    >>> conditions = Conditions({1: 4.0}, jitter=0.0)
    >>> conditions.factor(0, 7), conditions.factor(1, 7)
    (1.0, 4.0)
    """

    def __init__(self, slow: Mapping[int, float], jitter: float = 0.0, seed: int = 0):
        self._slow, self._jitter, self._seed = slow, jitter, seed

    def __bool__(self) -> bool:
        return bool(self._slow or self._jitter)

    def check(self, size: int) -> None:
        """Raise a `UsageError` for a rank that there is not among ``size``."""
        for rank in self._slow:
            if rank >= size:
                raise UsageError(f"slow: got rank {rank}, wanted 0 to {size - 1}")

    def factor(self, rank: int, index: int) -> float:
        """How many times as long as usual step ``index`` of ``rank`` takes."""
        drawn = generator(self._seed, JITTER, rank, index).random() if self._jitter else 0.0
        return self._slow.get(rank, 1.0) * (1 + 2 * self._jitter * drawn)

    def pace(self, comm: Any, step_seconds: float) -> Pace:
        """For a rank of ``comm``: simulated time passes, ``step_seconds`` a usual step; in real time the rank sleeps."""
        if comm.simulated:
            return lambda index, seconds: comm.compute(step_seconds * self.factor(comm.rank, index))
        return lambda index, seconds: time.sleep(seconds * (self.factor(comm.rank, index) - 1))
