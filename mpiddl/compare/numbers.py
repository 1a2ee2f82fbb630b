"""Figures and lists as they stand in a report."""

from __future__ import annotations

from collections.abc import Sequence

from mpiddl.study.intervals import ROUNDING, Mean, shown

NONE = "-"
MOST_NAMES = 6


def told(value: Mean | None, sign: str = "", unit: str = "") -> str:
    """A mean with its interval or range, to about three figures.

    Examples
    --------
    >>> from mpiddl.study.intervals import mean
    >>> told(Mean(96.204, 1.438, 3, 95.5, 96.9)), told(Mean(1234.5, 20.0, 3, 1220, 1240)), told(mean([0.0] * 3)), told(None)
    ('96.20 ± 1.44', '1234 ± 20', '0', '-')
    >>> told(mean([95.5, 96.5])), told(mean([7.5]))
    ('96.00 (95.50 to 96.50)', '7.50')
    """
    if value is None:
        return NONE
    size = abs(value.value)
    return shown(value, sign, 0 if size >= 1000 or not size else 1 if size >= 100 else 2, unit)


def difference(gap: Mean | None, unit: str, grain: float = 0.0) -> str:
    """A mean of paired differences, and whether it may be noise. Differences up to ``grain`` are too small to be measured.

    Examples
    --------
    >>> from mpiddl.study.intervals import mean
    >>> difference(mean([-0.8, 0.0, -0.4]), "points"), difference(mean([2.0, 2.1, 1.9]), "s")
    ('-0.40 ± 0.99 points, within noise', '+2.00 ± 0.25 s, beyond noise')
    >>> difference(mean([-0.8, 0.2]), "points"), difference(mean([0.1, 0.2]), "points")
    ('-0.30 points (-0.80 to +0.20), of both signs', '+0.15 points (+0.10 to +0.20) with both seeds')
    >>> difference(mean([0.5]), "points"), difference(mean([0.5, 0.5, 0.5]), "points")
    ('+0.50 points with one seed', '+0.50 points with every seed')
    >>> difference(mean([2.0, 2.1, 1.9]), "s", grain=2.1)
    '+2.00 ± 0.25 s, less than the time between two validations'
    """
    if gap is None:
        return "no seed in common"
    text = told(gap, "+", unit)
    if 0 < abs(gap.value) <= grain:
        return f"{text}, less than the time between two validations"
    if gap.seeds == 1:
        return f"{text} with one seed"
    if gap.half is None:
        return f"{text}, of both signs" if gap.noise else f"{text} with both seeds"
    if gap.half < ROUNDING < abs(gap.value):
        return f"{text} with every seed"  # of few rows and seeds: no interval to believe in
    return f"{text}, {'within' if gap.noise else 'beyond'} noise"


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


def listed(names: Sequence[str]) -> str:
    """Names as a list in a sentence, the first few of many.

    Examples
    --------
    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"]), listed(list("abcdefghi"))
    ('a', 'a and b', 'a, b and c', 'a, b, c, d, e and 4 more')
    """
    if len(names) > MOST_NAMES:
        names = [*names[: MOST_NAMES - 1], f"{len(names) - MOST_NAMES + 1} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def counted(number: int, what: str) -> str:
    """A number of things.

    Examples
    --------
    >>> counted(1, "run"), counted(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number} {what}{'s' * (number != 1)}"


def aligned(rows: Sequence[Sequence[str]], left: Sequence[bool]) -> list[list[str]]:
    """Cells padded to the width of their column, to the ``left`` or to the right.

    Examples
    --------
    >>> aligned([["a", "1"], ["bc", "10"]], [True, False])
    [['a ', ' 1'], ['bc', '10']]
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shapes = [f"{'<' if to_left else '>'}{width}" for width, to_left in zip(widths, left, strict=True)]
    return [[f"{cell:{shape}}" for cell, shape in zip(row, shapes, strict=True)] for row in rows]
