"""The receiving side of a channel: what has come is acknowledged, and what is missing is asked for.

Datagrams of one sender arrive in the order in which they were sent, save for a few. So a gap is a loss; the end of a transfer
is asked for only when its sender has said how far it is (PROBE).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable
from math import inf

from mpiddl import kernels
from mpiddl.transport.multicast.control import NOBODY, Control
from mpiddl.transport.multicast.medium import DEAF, HEARING, Destination
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

DEAF_S, DEAF_DATAGRAMS = 0.25, 32
"""Without anything by multicast, and with so many datagrams that came as repairs, this rank joins again."""

DEAF_JOINS = 4
"""Times that this rank has joined again in vain, until it tells the others to send to it directly."""

ROOM_S = 0.02
"""Without room in a lasting stream, until this rank asks the others what they have used."""

RUNS = 128
"""Of missing datagrams in one question."""


class Receiving:
    """Of one channel. Its methods are called by the channel, with its lock held."""

    def __init__(self, channel: Outlet):
        self._channel = channel
        self._draws = random.Random(channel.rank)
        self._repair_s, self._lossy_until = REPAIR_S, -inf
        self._windows: dict[int, int] = {}
        self._multicast, self._repaired, self._joins = channel.now(), 0, 0

    def look_anew(self) -> None:
        """Something may have come since the windows were worked out."""
        self._windows.clear()

    def note(self, stream: Stream, source: int, now: float) -> None:
        """See what has come since the last look, by multicast from ``source``, or as a repair if that is -1."""
        for slot, sender in zip(*(where.tolist() for where in (stream.there != stream.noted).nonzero()), strict=True):
            before, there = int(stream.noted[slot, sender]), int(stream.there[slot, sender])
            stream.noted[slot, sender] = there
            stream.times[slot, sender] = now
            round_ = stream.base + (slot - stream.base) % stream.slots
            incoming = stream.incoming.setdefault((round_, sender), Incoming())
            if source >= 0:
                incoming.sources.add(source)
                self._multicast, self._repaired = now, 0
                if self._joins:
                    self._hear()
            elif incoming.attempts or incoming.retry < inf:
                self._repair_s += 0.2 * (now - incoming.since - self._repair_s)
                self._listen(there - before if stream.groups[sender] is not None and not incoming.fetched else 0, now)
            complete = there == stream.counts[slot, sender]
            if complete:
                del stream.incoming[round_, sender]
            elif incoming.fetched and there == stream.tops[slot, sender]:
                self._fetch_part(stream, round_, sender, incoming, now)
            elif there < stream.tops[slot, sender] > incoming.asked and (
                    incoming.fetched or self._channel.rank in stream.receivers[sender]):  # else it is only overheard
                incoming.fresh = min(incoming.fresh, now + REORDER_S)
            window = min(self._window(stream), incoming.window or stream.usual_window(self._channel.window))
            often = 4 if now < self._lossy_until else 2  # a lost acknowledgement must not let the sender wait
            enough = complete or there - incoming.acknowledged >= max(window // often, 1)
            if enough and self._channel.rank in stream.receivers[sender]:
                self.acknowledge(stream, round_, sender, incoming.sources | {sender})

    def _listen(self, repaired: int, now: float) -> None:
        """So many datagrams did not come by multicast."""
        self._repaired += repaired
        if self._repaired >= DEAF_DATAGRAMS and now - self._multicast > DEAF_S:
            self._multicast, self._repaired, self._joins = now, 0, self._joins + 1
            self._channel.rejoin()
            if self._joins >= DEAF_JOINS:
                self._channel.tell_all(DEAF)
            if self._joins == DEAF_JOINS:
                warnings.warn(f"multicast: rank {self._channel.rank} gets nothing by multicast any more, and is sent each "
                              "message separately, which is slower; a switch with IGMP snooping needs a querier", stacklevel=2)

    def _hear(self) -> None:
        """Multicast comes again."""
        if self._joins >= DEAF_JOINS:
            self._channel.tell_all(HEARING)
        self._joins = 0

    def fetch(self, stream: Stream, round_: int, owner: int, now: float) -> None:
        """Ask for a transfer whose receiver this rank is not, of the size that transfers of ``owner`` have at most.

        A part of it may be here, if this rank has joined its address.
        """
        slot = round_ % stream.slots
        if not stream.complete(round_, owner):
            incoming = stream.incoming.setdefault((round_, owner), Incoming())
            if not incoming.fetched:
                stream.counts[slot, owner], incoming.fetched = stream.rooms[owner], True
                self._fetch_part(stream, round_, owner, incoming, now)

    def _fetch_part(self, stream: Stream, round_: int, owner: int, incoming: Incoming, now: float) -> None:
        """Ask for as much as may be under way."""
        slot, part = round_ % stream.slots, max(self._channel.window // 2, 1)
        incoming.fresh = now
        stream.tops[slot, owner] = min(stream.tops[slot, owner] + part, stream.counts[slot, owner])

    def acknowledge(self, stream: Stream, round_: int, owner: int, to: Iterable[Destination]) -> None:
        """Tell these ranks what is here, how much may be under way, and which rounds have room."""
        known = owner != NOBODY and stream.is_open(round_)
        got = int(stream.there[round_ % stream.slots, owner]) if known else 0
        values = got, self._window(stream), stream.base, stream.used_to
        if (incoming := stream.incoming.get((round_, owner))) is not None:
            incoming.acknowledged, incoming.window = values[:2]
        for rank in to:
            self._channel.tell(kernels.datagrams.ACK, rank, stream, round_, owner, values)

    def _window(self, stream: Stream) -> int:
        """Datagrams that may be under way from one sender: all transfers that are to come now share the window."""
        if stream.number in self._windows:
            return self._windows[stream.number]
        others = sum(bool(other.incoming) for other in self._channel.streams.values() if other is not stream)
        coming = max(stream.coming(self._channel.rank), len(stream.incoming), 1)
        self._windows[stream.number] = found = max(self._channel.window // coming // (1 + others), 1)
        return found

    def on_probe(self, stream: Stream, message: Control, now: float) -> None:
        """A sender says how far it is, and hears what is here."""
        if message.owner == NOBODY or len(message.values) != 2:
            self.acknowledge(stream, message.round, NOBODY, [message.sender])
            return
        sent, datagrams = message.values
        slot, owner = message.round % stream.slots, message.owner
        lacking = stream.is_open(message.round) and not stream.complete(message.round, owner)
        if lacking and datagrams <= stream.rooms[owner] and owner != self._channel.rank:
            stream.tops[slot, owner] = max(stream.tops[slot, owner], min(sent, stream.counts[slot, owner] or datagrams))
            if stream.there[slot, owner] < stream.tops[slot, owner]:
                incoming = stream.incoming.setdefault((message.round, owner), Incoming())
                incoming.sources.add(message.sender)
                if stream.tops[slot, owner] > incoming.asked:
                    incoming.fresh = min(incoming.fresh, now + REORDER_S)
        self.acknowledge(stream, message.round, owner, [message.sender])

    def remind(self, stream: Stream, now: float) -> None:
        """Ask for what is missing, where it is time, and for room."""
        if stream.lasting and stream.wanted_since is not None and now - stream.wanted_since > ROOM_S:
            stream.wanted_since = now
            for rank, used_to in enumerate(stream.used_by):
                if used_to <= stream.base:
                    self._channel.tell(kernels.datagrams.PROBE, rank, stream, stream.base, NOBODY, (0,))
        for (round_, owner), incoming in list(stream.incoming.items()):
            if now >= incoming.fresh:
                self._ask_fresh(stream, round_, owner, incoming, now)
            if now >= incoming.retry:
                self._ask_again(stream, round_, owner, incoming, now)

    def _ask_fresh(self, stream: Stream, round_: int, owner: int, incoming: Incoming, now: float) -> None:
        end = int(stream.tops[round_ % stream.slots, owner])
        runs = stream.gaps(round_, owner, incoming.asked, end, RUNS)
        if more := len(runs) == RUNS:
            end = sum(runs[-1])
        if runs:
            if incoming.retry == inf:
                incoming.attempts, incoming.seen = 0, int(stream.there[round_ % stream.slots, owner])
                incoming.retried, incoming.retry = end, now + self._pause(0)
            self._ask(stream, round_, owner, incoming, now, 0, runs)
        incoming.asked, incoming.fresh = end, now + REORDER_S if more else inf

    def _ask_again(self, stream: Stream, round_: int, owner: int, incoming: Incoming, now: float) -> None:
        runs = stream.gaps(round_, owner, 0, incoming.retried, RUNS)
        there = int(stream.there[round_ % stream.slots, owner])
        incoming.attempts = (1 if there > incoming.seen else incoming.attempts + 1) if runs else 0
        incoming.seen = there
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
        if incoming.fetched:
            senders = others or [other for other in range(self._channel.size) if other != rank]
        to = self._draws.choice(others if others and not attempts else senders)
        values = attempts, rank, *(first | number << 32 for first, number in runs)
        self._channel.tell(kernels.datagrams.NACK, to, stream, round_, owner, values)
