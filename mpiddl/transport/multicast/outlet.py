"""What the sending, receiving and repairing side of a channel ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from mpiddl.transport.multicast.medium import Destination
from mpiddl.transport.multicast.stream import Stream


class Outlet(Protocol):
    """Attributes: this rank, and how many there are; datagrams that may be under way to it; most datagrams of a burst; whether
    each rank answers at once (`Medium`)."""

    rank: int
    size: int
    window: int
    burst_datagrams: int
    prompt: bool

    @property
    def streams(self) -> Mapping[int, Stream]:
        """By number."""

    def now(self) -> float:
        """Seconds."""

    @property
    def queued(self) -> int:
        """Bursts that wait for room to be sent."""

    @property
    def sending(self) -> bool:
        """Whether transfers of this rank are waiting to be sent."""

    def departed(self) -> float:
        """When all that was dispatched will have left this host."""

    def count(self, what: str, number: int = 1) -> None:
        """Note something for `Channel.figures`."""

    def tell(self, kind: int, to: Destination, stream: Stream, round_: int, owner: int, values: tuple[int, ...]) -> None:
        """Send a control message, which may get lost."""

    def dispatch(self, stream: Stream, round_: int, owner: int, nbytes: int, indices: np.ndarray,
                 to: Sequence[Destination]) -> None:
        """Send datagrams of a transfer in one burst, to each of these."""

    def advance(self, stream: Stream) -> None:
        """Free slots, and tell the senders early enough."""

    def rejoin(self) -> None:
        """Join the multicast addresses again."""

    def tell_all(self, what: int, numbers: tuple[int, ...] = ()) -> None:
        """Send `DEAF`, `HEARING` or `DIFFER` to each rank."""
