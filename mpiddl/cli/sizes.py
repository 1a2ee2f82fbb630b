"""Values that options of several commands accept: sizes in bytes, lists of counts, seconds."""

from __future__ import annotations

import click

from mpiddl.errors import UsageError

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str, name: str) -> int:
    """Bytes from a text such as 256KiB; errors name the option ``name``."""
    digits = text.rstrip("BbIiKkMmGg")
    unit = text[len(digits) :].upper()
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise UsageError(f"{name}: got {text!r}, expected a size in B, KiB, MiB or GiB, such as 256KiB")
    return size


def read_sizes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Several of them, separated by commas: the callback of an option."""
    return tuple(parse_size(part.strip(), "sizes") for part in value.rstrip(",").split(","))


def read_counts(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Whole numbers from 1, separated by commas: the callback of an option."""
    try:
        counts = tuple(int(part) for part in value.split(",") if part)
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise UsageError(f"{parameter.name}: got {value!r}, expected whole numbers of 1 or more, separated by commas")
    return counts


def read_seconds(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """Up to a day: the callback of an option."""
    if not 0 <= value <= 86_400:
        raise UsageError(f"seconds: got {value:g}, expected a number from 0 to 86400")
    return value
