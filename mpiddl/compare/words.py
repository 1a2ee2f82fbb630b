"""Figures as they stand in a report."""

from __future__ import annotations

from mpiddl.bench.intervals import Mean, with_half

NONE = "-"
SAME = 1e-9


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


def difference(gap: Mean | None, unit: str, grain: float = 0.0) -> str:
    """A mean of paired differences, and whether it may be chance; what is within ``grain`` cannot be told apart.

    Examples
    --------
    >>> difference(Mean(-0.4, 0.9, 3), "points"), difference(Mean(2.0, 0.5, 3), "s")
    ('-0.40 ± 0.90 points, within noise', '+2.00 ± 0.50 s, beyond noise')
    >>> difference(Mean(0.5, 0.0, 2), "points")
    '+0.50 points with every seed'
    >>> difference(Mean(2.0, 0.5, 3), "s", grain=2.1)
    '+2.00 ± 0.50 s, no more than there is between two validations'
    """
    if gap is None:
        return "no seed in common"
    if 0 < abs(gap.value) <= grain:
        return f"{told(gap, '+')} {unit}, no more than there is between two validations"
    if gap.half is None:
        return f"{told(gap, '+')} {unit}, one seed"
    if gap.half < SAME < abs(gap.value):
        return f"{told(gap, '+')} {unit} with every seed"  # of few rows and seeds: no interval to believe in
    return f"{told(gap, '+')} {unit}, {'within' if abs(gap.value) <= max(gap.half, SAME) else 'beyond'} noise"


def times(ours: float, theirs: float, what: str) -> str:
    """How much of ``what`` the one takes, against the other.

    Examples
    --------
    >>> times(1.0, 8.0, "bytes"), times(8.0, 1.0, "bytes"), times(1.0, 1.01, "bytes")
    ('8.0 times fewer bytes', '8.0 times as many bytes', 'as many bytes')
    """
    more = max(ours, theirs) / min(ours, theirs)
    if more < 1.05:
        return f"as many {what}"
    return f"{more:.1f} times {'fewer' if theirs > ours else 'as many'} {what}"


def percent(share: float) -> str:
    """A share as a person writes it.

    Examples
    --------
    >>> percent(0.94), percent(0.985)
    ('94 %', '98.5 %')
    """
    return f"{100 * share:.6g} %"
