"""Arrays that several ranks hold copies of: whether they still have the same bits."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from mpiddl.errors import CommError

FIRST, EVERY = 3, 100
"""Rounds at the beginning that are checked, and how often later ones are."""

BIT = 1 << 32
"""In the number of an array that was checked; 0: it was not."""


def checksum(array: np.ndarray, round_: int) -> int:
    """A number that is the same for the same bits; 0 in most rounds. Cost: one pass over the array, about a second for 1 GB."""
    return BIT | crc32(array.view(np.uint8).data) if round_ < FIRST or round_ % EVERY == 0 else 0


def check_same(rank: int, own: int, other: int, theirs: int) -> None:
    """Raise a `CommError`, on this rank, if the numbers tell of different arrays."""
    if own and theirs and own != theirs:
        raise CommError(f"ranks {rank} and {other} computed different bits for the same gradient, expected the same bits; use "
                        "processors of one kind, the same libraries, and as many threads on each host")
