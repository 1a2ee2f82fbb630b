"""Figures as they stand in a report."""

from __future__ import annotations

from mpiddl.bench.intervals import Mean, with_half

NONE = "-"


def told(value: Mean | None, sign: str = "") -> str:
    """A mean and half its interval, to three figures or so; an interval that rounds to nothing is left out.

    Examples
    --------
    >>> told(Mean(96.204, 1.438, 3)), told(Mean(1234.5, 20.0, 3)), told(Mean(0.0, 0.0, 3)), told(None)
    ('96.20 ± 1.44', '1234 ± 20', '0', '-')
    """
    if value is None:
        return NONE
    size = abs(value.value)
    digits = 0 if size >= 1000 or not size else 1 if size >= 100 else 2
    seen = value.half is not None and float(f"{value.half:.{digits}f}")
    rounded = round(value.value, digits) + 0.0  # not -0.00
    return with_half(rounded, value.half if seen else None, sign, digits)


def difference(gap: Mean | None, unit: str) -> str:
    """A mean of paired differences, and whether it may be chance.

    Examples
    --------
    >>> difference(Mean(-0.4, 0.9, 3), "points"), difference(Mean(2.0, 0.5, 3), "s")
    ('-0.40 ± 0.90 points, within noise', '+2.00 ± 0.50 s, beyond noise')
    """
    if gap is None:
        return "no seed in common"
    if gap.half is None:
        return f"{told(gap, '+')} {unit}, one seed"
    return f"{told(gap, '+')} {unit}, {'within' if abs(gap.value) <= gap.half else 'beyond'} noise"


def percent(share: float) -> str:
    """A share as a person writes it.

    Examples
    --------
    >>> percent(0.94), percent(0.985)
    ('94 %', '98.5 %')
    """
    return f"{100 * share:.6g} %"
