"""Means of several seeds, with 95 % intervals.

An interval is that of Student's t for the mean of n seeds: half of it is t(0.975, n - 1) s / sqrt(n). One seed has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from scipy import stats


class Mean(NamedTuple):
    """Of several seeds; ``half`` the width of its interval, None of one."""

    value: float
    half: float | None
    seeds: int


def mean(values: Sequence[float]) -> Mean:
    """The mean and its interval.

    Examples
    --------
    >>> value, half, seeds = mean([1.0, 2.0, 3.0])
    >>> value, round(half, 4), seeds
    (2.0, 2.4841, 3)
    """
    n = len(values)
    half = float(stats.t.ppf(0.975, n - 1)) * stdev(values) / sqrt(n) if n > 1 else None
    return Mean(fmean(values), half, n)


def with_half(value: float, half: float | None, sign: str = "", digits: int = 2) -> str:
    """A mean and half its interval as a person reads them; ``sign`` "+" tells the sign of what is above 0, too.

    Examples
    --------
    >>> with_half(0.4, 0.25, "+"), with_half(1.0, None)
    ('+0.40 ± 0.25', '1.00')
    """
    return f"{value:{sign}.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")
