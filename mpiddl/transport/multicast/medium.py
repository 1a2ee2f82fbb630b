"""What carries datagrams between the ranks of a channel, and may lose, repeat or reorder them.

Mediums: UDP sockets (`mpiddl.transport.multicast.sockets`), virtual ranks (`mpiddl.transport.multicast.virtual_medium`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

BURST_BYTES = 65_000
"""Most bytes of a burst: what one system call sends, as datagrams of equal size."""

BURST_DATAGRAMS = 64
"""Most datagrams of a burst (UDP_MAX_SEGMENTS of Linux 4.18)."""

MOST_GROUPS = 256
"""Multicast addresses of a channel."""

WHOLE, SHORT, DEAF, HEARING, DIFFER = range(MOST_GROUPS, MOST_GROUPS + 5)
"""Messages to one rank that belong to no stream: a long and a short one of the self-test; the sender gets nothing by multicast,
or gets it again; two ranks have different copies of an array."""


class Group(NamedTuple):
    """A multicast address of the channel, by number."""

    number: int


Destination: TypeAlias = "int | Group"
"""One rank, or all ranks that have joined a multicast address."""


class Received(NamedTuple):
    """Datagrams that have come one behind the other: where they begin in the buffer, their bytes, those of each datagram but
    the last, the rank that sent them or -1, and whether they came to a multicast address."""

    begin: int
    nbytes: int
    segment: int
    source: int
    multicast: bool


class Medium(Protocol):
    """Attributes: bytes of a datagram at most; bytes that a receiver can be behind; whether each rank answers at once, whatever
    it computes."""

    datagram_bytes: int
    buffer_bytes: int
    prompt: bool

    def now(self) -> float:
        """Seconds."""

    def departed(self) -> float:
        """When all that was sent will have left this host, as far as it is known."""

    def send(self, burst: np.ndarray, segment: int, to: Destination) -> bool:
        """Send datagrams of ``segment`` bytes, the last one may be shorter; False where there is no room now."""

    def receive(self, buffer: np.ndarray) -> list[Received]:
        """What has come, as far as the buffer has room."""

    def wait(self, seconds: float, to_send: bool) -> None:
        """Wait until a burst has come, or there is room to send; no longer than so many seconds."""

    def rejoin(self) -> None:
        """Join the multicast addresses again: a switch may have forgotten who has joined."""

    def flush(self) -> None:
        """All that was to be sent for now has been given to `send`."""

    def close(self) -> None:
        """Give everything back."""
