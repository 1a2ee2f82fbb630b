"""Means over several seeds, with 95 % intervals, or with ranges where there are too few seeds for an interval.

The interval is Student's t interval of the mean of n seeds: half of it is t(0.975, n - 1) s / sqrt(n). With two seeds t is
12.7, and an interval would say nothing. Fewer than three seeds have a range instead: the smallest and the largest value.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from scipy import stats

ENOUGH = 3
"""Seeds that an interval needs."""

ROUNDING = 1e-9


class Mean(NamedTuple):
    """A mean over seeds.

    half : half the width of its interval; None with fewer than three seeds.
    low, high : the range of the seeds.
    """

    value: float
    half: float | None
    seeds: int
    low: float
    high: float

    @property
    def noise(self) -> bool:
        """Whether a mean of differences may be 0 by chance: its interval, or its range with fewer than three seeds, holds 0.

        Examples
        --------
        >>> mean([-0.1, 0.4, 0.3]).noise, mean([0.3, 0.4, 0.3]).noise, mean([-0.1, 0.2]).noise, mean([0.1, 0.2]).noise
        (True, False, True, False)
        """
        if self.half is not None:
            return abs(self.value) <= max(self.half, ROUNDING)
        return self.low <= ROUNDING and self.high >= -ROUNDING


def mean(values: Sequence[float]) -> Mean:
    """The mean, its interval and its range.

    Examples
    --------
    >>> value, half, seeds, low, high = mean([1.0, 2.0, 3.0])
    >>> value, round(half, 4), seeds, low, high
    (2.0, 2.4841, 3, 1.0, 3.0)
    """
    n = len(values)
    half = float(stats.t.ppf(0.975, n - 1)) * stdev(values) / sqrt(n) if n >= ENOUGH else None
    return Mean(fmean(values), half, n, min(values), max(values))


def shown(mean: Mean, sign: str = "", digits: int = 2, unit: str = "") -> str:
    """A mean with half its interval, or with its range; ``sign`` "+" also marks what is above 0.

    A spread that rounds to 0 is left out.

    Examples
    --------
    >>> shown(mean([0.3, 0.4, 0.5]), "+"), shown(mean([95.5, 96.5])), shown(mean([1.0]))
    ('+0.40 ± 0.25', '96.00 (95.50 to 96.50)', '1.00')
    >>> shown(mean([0.3, 0.4, 0.5]), unit="s"), shown(mean([95.5, 96.5]), unit="%")
    ('0.40 ± 0.25 s', '96.00 % (95.50 to 96.50)')
    """
    unit = f" {unit}" * bool(unit)
    # Adding 0.0 turns -0.00 into 0.00.
    value, low, high = (f"{round(each, digits) + 0.0:{sign}.{digits}f}" for each in (mean.value, mean.low, mean.high))
    if mean.half is None:
        return f"{value}{unit}" + (f" ({low} to {high})" if low != high else "")
    half = f"{mean.half:.{digits}f}"
    return value + (f" ± {half}" if float(half) else "") + unit
