"""Numbers of bytes as people write them."""

from __future__ import annotations

from mpiddl.errors import UsageError

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str, name: str) -> int:
    """Bytes from a text such as 256KiB; ``name`` is what errors call it."""
    digits = text.rstrip("BbIiKkMmGg")
    unit = text[len(digits) :].upper()
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise UsageError(f"{name}: got {text!r}, wanted a number with B, KiB, MiB or GiB, such as 256KiB")
    return size
