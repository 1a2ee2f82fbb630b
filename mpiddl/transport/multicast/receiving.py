"""The receiving side of a channel: what has come is acknowledged, and what is missing is asked for.

Datagrams of one sender arrive in the order in which they were sent, save for a few. So a gap is a loss; the end of a transfer
is asked for only when its sender has said how far it is (PROBE).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from math import inf

import numpy as np

from mpiddl import kernels
from mpiddl.transport.multicast.control import NOBODY, Control
from mpiddl.transport.multicast.outlet import Outlet
from mpiddl.transport.multicast.stream import Stream
from mpiddl.transport.multicast.transfers import Incoming

REORDER_S = 0.001
"""From a gap to the first question: datagrams may have overtaken each other."""

REPAIR_S = 0.01
"""What a repair is taken to need before one was measured."""

LEAST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.5
"""Between two questions about the same datagrams."""

LOSSY_S = 1.0
"""After a question, during which acknowledgements are sent twice as often."""

DEAF_S = 0.25
"""Without anything by multicast while this rank asks for it again, after which it joins again."""

RUNS = 128
"""Of missing datagrams in one question."""


class Receiving:
    """Of one channel. Its methods are called by the channel, with its lock held."""

    def __init__(self, channel: Outlet):
        self._channel = channel
        self._draws = random.Random(channel.rank)
        self._repair_s, self._lossy_until = REPAIR_S, -inf
        self._multicast = self._rejoined = channel.now()

    def note(self, stream: Stream, source: int, now: float) -> None:
        """See what has come since the last look, by multicast from ``source``, or as a repair if that is -1."""
        window = 0
        for slot, sender in np.argwhere(stream.there != stream.noted).tolist():
            stream.noted[slot, sender] = there = int(stream.there[slot, sender])
            stream.times[slot, sender] = now
            round_ = stream.base + (slot - stream.base) % stream.slots
            incoming = stream.incoming.setdefault((round_, sender), Incoming())
            if source >= 0:
                incoming.sources.add(source)
                self._multicast = now
            elif incoming.attempts or incoming.retry < inf:
                self._repair_s += 0.2 * (now - incoming.since - self._repair_s)
            complete = there == stream.counts[slot, sender]
            if complete:
                del stream.incoming[round_, sender]
            elif there < stream.tops[slot, sender] > incoming.asked:
                incoming.fresh = min(incoming.fresh, now + REORDER_S)
            window = window or self._window(stream)
            often = 4 if now < self._lossy_until else 2  # a lost acknowledgement must not let the sender wait
            if complete or there - incoming.acknowledged >= max(window // often, 1):
                incoming.acknowledged = there
                self.acknowledge(stream, round_, sender, incoming.sources | {sender})

    def acknowledge(self, stream: Stream, round_: int, owner: int, to: Iterable[int]) -> None:
        """Tell these ranks what is here, how much may be under way, and which rounds have room."""
        known = owner != NOBODY and stream.is_open(round_)
        got = int(stream.there[round_ % stream.slots, owner]) if known else 0
        for rank in to:
            self._channel.tell(kernels.datagrams.ACK, rank, stream, round_, owner, (got, self._window(stream), stream.base))

    def _window(self, stream: Stream) -> int:
        """Datagrams that may be under way from one sender: all transfers that are to come now share the window."""
        others = any(other.incoming for other in self._channel.streams.values() if other is not stream)
        coming = max(stream.coming(self._channel.rank), len(stream.incoming), 1)
        return max(self._channel.window // coming // (1 + others), 1)

    def on_probe(self, stream: Stream, message: Control, now: float) -> None:
        """A sender says how far it is, and hears what is here."""
        if message.owner == NOBODY or len(message.values) != 2:
            return
        sent, datagrams = message.values
        slot, owner = message.round % stream.slots, message.owner
        if stream.is_open(message.round) and 0 < datagrams <= stream.rooms[owner] and owner != self._channel.rank:
            stream.counts[slot, owner] = stream.counts[slot, owner] or datagrams
            stream.tops[slot, owner] = max(stream.tops[slot, owner], min(sent, stream.counts[slot, owner]))
            if stream.there[slot, owner] < stream.tops[slot, owner]:
                incoming = stream.incoming.setdefault((message.round, owner), Incoming())
                incoming.sources.add(message.sender)
                if stream.tops[slot, owner] > incoming.asked:
                    incoming.fresh = min(incoming.fresh, now + REORDER_S)
        self.acknowledge(stream, message.round, owner, [message.sender])

    def remind(self, stream: Stream, now: float) -> None:
        """Ask for what is missing, where it is time."""
        for (round_, owner), incoming in list(stream.incoming.items()):
            if now >= incoming.fresh:
                self._ask_fresh(stream, round_, owner, incoming, now)
            if now >= incoming.retry:
                self._ask_again(stream, round_, owner, incoming, now)

    def _ask_fresh(self, stream: Stream, round_: int, owner: int, incoming: Incoming, now: float) -> None:
        end = int(stream.tops[round_ % stream.slots, owner])
        incoming.fresh = inf
        runs = stream.gaps(round_, owner, incoming.asked, end, RUNS)
        if len(runs) == RUNS:
            end, incoming.fresh = sum(runs[-1]), now + REORDER_S
        incoming.asked = end
        if runs:
            self._ask(stream, round_, owner, incoming, now, 0, runs)
            if incoming.retry == inf:
                incoming.attempts, incoming.retried, incoming.retry = 0, end, now + self._pause(0)

    def _ask_again(self, stream: Stream, round_: int, owner: int, incoming: Incoming, now: float) -> None:
        runs = stream.gaps(round_, owner, 0, incoming.retried, RUNS)
        incoming.attempts = incoming.attempts + 1 if runs else 0
        if now - max(self._multicast, self._rejoined) > DEAF_S:
            self._rejoined = now
            self._channel.rejoin()
        if runs:
            self._ask(stream, round_, owner, incoming, now, incoming.attempts, runs)
        elif not stream.gaps(round_, owner, 0, incoming.asked, 1):
            incoming.retry = inf
            return
        incoming.retried, incoming.retry = incoming.asked, now + self._pause(incoming.attempts)

    def _pause(self, attempts: int) -> float:
        return min(max(LEAST_PAUSE_S, 2 * self._repair_s) * 2 ** min(attempts, 8), LONGEST_PAUSE_S)

    def _ask(self, stream: Stream, round_: int, owner: int, incoming: Incoming, now: float, attempts: int,
             runs: list[tuple[int, int]]) -> None:
        """Another receiver at first, if there is one: the sender's link has enough to carry. Then whoever sends it."""
        incoming.since, self._lossy_until = now, now + LOSSY_S
        rank = self._channel.rank
        others = [other for other in stream.receivers[owner] if other != rank]
        senders = sorted((incoming.sources | {owner}) - {rank})
        to = self._draws.choice(others if others and not attempts else senders)
        values = attempts, rank, *(first | number << 32 for first, number in runs)
        self._channel.tell(kernels.datagrams.NACK, to, stream, round_, owner, values)
