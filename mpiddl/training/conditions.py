"""Conditions that a run is put under: ranks that compute slower than others, steps that vary, ranks that are gone for a while.

The same in every run with the same seed: what a step takes depends on the seed, the rank and the step's number alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from mpiddl.data.draws import generator
from mpiddl.errors import UsageError
from mpiddl.transport.comm import Comm
from mpiddl.transport.virtual import VirtualComm

JITTER = 18
"""Purpose of the generator that draws them (`mpiddl.data.draws`)."""

Pace = Callable[[int, float, int, int], None]
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
    drop : mapping of int to (int, int or None)
        By rank, before which of its steps it is gone: for as long as the steps up to the second one would take it, then it goes
        on where it was; None: for good (`mpiddl.training.loop.Plan`).

    Examples
    --------
    >>> conditions = Conditions({1: 4.0}, jitter=0.0)
    >>> conditions.factor(0, 7), conditions.factor(1, 7)
    (1.0, 4.0)
    """

    def __init__(self, slow: Mapping[int, float], jitter: float = 0.0, seed: int = 0,
                 drop: Mapping[int, tuple[int, int | None]] | None = None):
        self._slow, self._jitter, self._seed, self._drop = slow, jitter, seed, drop or {}

    def __bool__(self) -> bool:
        return bool(self._slow or self._jitter or self._drop)

    def check(self, size: int) -> None:
        """Raise a `UsageError` for a rank that there is not among ``size``."""
        for name, ranks in (("slow", self._slow), ("drop", self._drop)):
            for rank in ranks:
                if rank >= size:
                    raise UsageError(f"{name}: got rank {rank}, expected a rank from 0 to {size - 1}")

    def factor(self, rank: int, index: int) -> float:
        """How many times as long as usual step ``index`` of ``rank`` takes."""
        drawn = generator(self._seed, JITTER, rank, index).random() if self._jitter else 0.0
        return self._slow.get(rank, 1.0) * (1 + 2 * self._jitter * drawn)

    def absent(self, rank: int, index: int) -> float:
        """For how many usual steps ``rank`` is gone before its step ``index``.

        Examples
        --------
        >>> conditions = Conditions({1: 4.0}, drop={1: (5, 8)})
        >>> conditions.absent(1, 4), conditions.absent(1, 5)
        (0.0, 12.0)
        """
        begin, end = self._drop.get(rank, (0, None))
        return (end - begin) * self._slow.get(rank, 1.0) if end is not None and index == begin else 0.0

    def pace(self, comm: Comm, step_seconds: float) -> Pace:
        """For a rank of ``comm``: simulated time passes, ``step_seconds`` a usual step; in real time the rank sleeps.

        Called for each part of a gradient with the step, the seconds that the part took, its number and how many there are.
        Steps may be left out: the rank is then gone before the next one that it computes.
        """
        rank, last = comm.rank, None  # type: tuple[int, int | None]

        def missed(index: int) -> float:
            """For how many usual steps the rank is gone since the last part."""
            nonlocal last
            steps = range(index if last is None else last + 1, index + 1)
            last = index
            return sum(self.absent(rank, step) for step in steps)

        def simulated(index: int, seconds: float, number: int, parts: int) -> None:
            assert isinstance(comm, VirtualComm)
            comm.compute(step_seconds * (missed(index) + self.factor(rank, index) / parts))

        def real(index: int, seconds: float, number: int, parts: int) -> None:
            time.sleep(seconds * (parts * missed(index) + self.factor(rank, index) - 1))

        return simulated if isinstance(comm, VirtualComm) and comm.simulated else real
