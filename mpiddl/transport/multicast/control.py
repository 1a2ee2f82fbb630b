"""Control datagrams: short messages of one rank to another about streams; none is carried out twice.

Each has a sequence number in word 1, where data have an index and a count. A receiver remembers which of the last ones it has
had (`ReplayWindow`), as IPsec does (RFC 4303, section 3.4.3).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpiddl import kernels

WINDOW = 1024
"""Sequence numbers that a receiver remembers: bits of a number."""

NOBODY = 0xFFFF
"""As the owner of a transfer: the message is about the stream alone."""


class Control(NamedTuple):
    """A message: its kind, the rank that sent it, the stream, round and owner of the transfer it is about, and numbers.

    ===== ==========================================================================================
    ACK   datagrams that the sender of the message has; datagrams that may be under way to it; the
          first round for which it has room
    NACK  how often it has asked; the rank that lacks them; runs of datagrams, each as ``first | number << 32``
    PROBE datagrams sent; datagrams of the transfer: what do you have?
    HELLO the multicast address, by number
    ===== ==========================================================================================
    """

    kind: int
    sender: int
    stream: int
    round: int
    owner: int
    values: tuple[int, ...]


def packed(message: Control, sequence: int, key: np.ndarray) -> np.ndarray:
    """The datagram, in words."""
    words = [message.owner, *message.values]
    first = (message.round | message.sender << kernels.datagrams.SENDER_SHIFT
             | message.stream << kernels.datagrams.STREAM_SHIFT)
    second = message.kind | 8 * len(words) << kernels.datagrams.BYTES_SHIFT | sequence << kernels.datagrams.INDEX_SHIFT
    datagram = np.array([first, second, *words, 0], np.uint64)
    kernels.datagrams.seal(datagram, key)
    return datagram


def unpacked(datagram: np.ndarray) -> tuple[Control, int] | None:
    """The message and its sequence number; None where the header makes no sense. The tag has been checked."""
    first, second, *words = datagram[:-1].tolist()
    nbytes = second >> kernels.datagrams.BYTES_SHIFT & kernels.datagrams.MOST_PAYLOAD
    if not words or nbytes != 8 * len(words):
        return None
    sender = first >> kernels.datagrams.SENDER_SHIFT & kernels.datagrams.LAST_SENDER
    stream = first >> kernels.datagrams.STREAM_SHIFT
    message = Control(second & 15, sender, stream, first & kernels.datagrams.LAST_ROUND, words[0], tuple(words[1:]))
    return message, second >> kernels.datagrams.INDEX_SHIFT


class ReplayWindow:
    """Which sequence numbers of one sender have come."""

    def __init__(self) -> None:
        self._last, self._had = 0, 0  # the bit of number last - k is 1 << k

    def is_new(self, sequence: int) -> bool:
        """Note a number; False if it was there before, or is too old to tell."""
        ahead = sequence - self._last
        if ahead > 0:
            had = (self._had << ahead if ahead < WINDOW else 0) & ((1 << WINDOW) - 1) | 1
            self._last, self._had = sequence, had
            return True
        if -ahead >= WINDOW or self._had >> -ahead & 1:
            return False
        self._had |= 1 << -ahead
        return True
