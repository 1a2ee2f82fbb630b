"""Arrays that several ranks hold copies of: whether they still have the same bits, and the size and dtype that was agreed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np

from mpiddl.collectives.arguments import flat
from mpiddl.errors import CommError, ShapeError
from mpiddl.transport.multicast.channel import Channel
from mpiddl.transport.multicast.medium import DIFFER

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
        raise differing(rank, other)


def compare(channel: Channel, rank: int, own: int, other: int, theirs: int) -> None:
    """The same, and tell all ranks of a channel: they raise the error when they wait for another rank (`watched`)."""
    if own and theirs and own != theirs:
        channel.tell_all(DIFFER, (rank, other))
        raise differing(rank, other)


def watched(channel: Channel, since: Callable[[], float | None]) -> Callable[[], float | None]:
    """``since``, which raises a `CommError` instead if another rank has found different copies."""

    def asked() -> float | None:
        if channel.differing is not None:
            raise differing(*channel.differing)
        return since()

    return asked


def differing(rank: int, other: int) -> CommError:
    """The error for different copies."""
    first, second = sorted((rank, other))
    return CommError(f"ranks {first} and {second} computed different bits for the same gradient, expected the same bits; use "
                     "processors of one kind, the same libraries, and as many threads on each host")


def checked(array: Any, result: np.ndarray) -> np.ndarray:
    """A contiguous array as a 1-D view; a `ShapeError` unless it has the size and dtype of ``result``."""
    found = flat("array", array)
    if (found.size, found.dtype) != (result.size, result.dtype):
        raise ShapeError(f"array: got {found.size} elements of {found.dtype}, expected {result.size} of {result.dtype}")
    return found
