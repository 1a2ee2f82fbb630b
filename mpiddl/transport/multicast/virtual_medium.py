"""A medium for virtual ranks: one copy of a burst occupies the sender's link, and one the link of each receiver.

Links carry both directions at once, at the rate of the `mpiddl.transport.virtual.Wire`. Nothing gets lost. What a rank receives
is handled at the simulated moment at which it arrives, whatever the rank is computing then.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from typing import Any

import numpy as np

from mpiddl.transport.multicast.medium import Destination, Group, Received
from mpiddl.transport.virtual import VirtualTransport

DATAGRAM_BYTES, BUFFER_BYTES = 1472, 1 << 24

SHORT_BYTES = 256
"""A burst of so few bytes waits for no other one. On a real link there is no more than a window before it; here transfers
occupy a link in one piece."""


class Network:
    """What the mediums of all ranks share: the links, and the bursts on their way."""

    def __init__(self) -> None:
        self.mediums: list[VirtualMedium] = []
        self.members: dict[int, set[int]] = {}
        self._events: list[tuple[float, int, int, Any]] = []
        self._numbers = count()
        self._at_work = False

    def carry(self, source: VirtualMedium, burst: np.ndarray, segment: int, to: Destination) -> None:
        """Put a burst on its way."""
        wire, now = source.transport.wire, source.now()
        seconds = burst.nbytes / wire.rate
        short = burst.nbytes <= SHORT_BYTES
        if not short:
            source.egress = max(now, source.egress) + seconds
        ranks = self.members.get(to.number, set()) if isinstance(to, Group) else {to}
        for rank in sorted(ranks - {source.transport.rank}):
            target, arrival = self.mediums[rank], now + seconds
            if not short:
                arrival = target.ingress = max(source.egress, target.ingress + seconds)
            item = burst.copy(), segment, source.transport.rank, isinstance(to, Group)
            heapq.heappush(self._events, (arrival + wire.latency, next(self._numbers), rank, item))

    def settle(self) -> None:
        """Let all bursts arrive, in the order of time, and be answered."""
        if self._at_work:
            return
        self._at_work = True
        try:
            while self._events:
                moment, _, rank, item = heapq.heappop(self._events)
                target = self.mediums[rank]
                target.moment = moment
                target.inbox.append(item)
                target.channel.pump()
                target.moment = None
        finally:
            self._at_work = False


class VirtualMedium:
    """That of one virtual rank. ``moment``: the simulated time at which it handles what comes, or None for the rank's own."""

    datagram_bytes, buffer_bytes, prompt = DATAGRAM_BYTES, BUFFER_BYTES, True
    channel: Any

    def __init__(self, transport: VirtualTransport, network: Network):
        self.transport, self.network = transport, network
        self.moment: float | None = None
        self.egress = self.ingress = 0.0
        self.inbox: deque[tuple[np.ndarray, int, int, bool]] = deque()

    def now(self) -> float:
        return self.transport.clock if self.moment is None else self.moment

    def departed(self) -> float:
        return max(self.now(), self.egress)

    def send(self, burst: np.ndarray, segment: int, to: Destination) -> bool:
        self.network.carry(self, burst, segment, to)
        return True

    def receive(self, buffer: np.ndarray) -> list[Received]:
        if not self.inbox:
            return []
        burst, segment, source, multicast = self.inbox.popleft()
        buffer.view(np.uint8)[: burst.nbytes] = burst
        return [Received(0, burst.nbytes, segment, source, multicast)]

    def wait(self, seconds: float, to_send: bool) -> None:
        """Nothing comes while a rank waits here: others send, and have it handled."""

    def rejoin(self) -> None:
        """Nothing forgets who has joined."""

    def flush(self) -> None:
        self.network.settle()

    def close(self) -> None:
        self.inbox.clear()
