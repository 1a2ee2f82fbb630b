"""Repair: datagrams that a rank lacks are sent again by whichever rank was asked, if it has them.

A rank to which they have not come yet answers when they do; one that has lost them, too, passes the question on to their
sender. What several ranks lack at a time goes to all of them at once, by multicast.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from mpiddl import kernels
from mpiddl.transport.multicast.control import NOBODY, Control
from mpiddl.transport.multicast.medium import Destination
from mpiddl.transport.multicast.outlet import Outlet
from mpiddl.transport.multicast.stream import Stream

DIRECT = 2
"""From so many questions on, multicast is taken to have failed: the answer goes to one rank."""

QUEUE = 64
"""Bursts that wait for room; what would be the next ones is asked for again."""

RUNS = 128
"""Of missing datagrams in one question."""


Wanted: TypeAlias = dict[int, dict[int, int]]
"""By datagram: who lacks it, and how often they have asked."""


class Repairing:
    """Of one channel. Its methods are called with the lock of the channel held."""

    def __init__(self, channel: Outlet):
        self._channel = channel
        self._wanted: dict[tuple[int, int, int], Wanted] = {}

    def on_nack(self, stream: Stream, message: Control) -> None:
        """Note what is wanted."""
        if message.owner == NOBODY or len(message.values) < 3 or not stream.is_open(message.round):
            return
        attempts, asker, *runs = message.values
        known = asker < self._channel.size and asker != self._channel.rank
        if known and attempts <= 0xFFFF:
            wanted = self._wanted.setdefault((stream.number, message.round, message.owner), {})
            begin, most = 0, int(stream.rooms[message.owner])
            for run in runs:  # each behind the one before
                first, number = run & 0xFFFFFFFF, run >> 32
                for index in range(max(first, begin), min(first + number, most)):
                    wanted.setdefault(index, {})[asker] = attempts
                begin = max(first + number, begin)

    def answer(self) -> None:
        """Send what was asked for and is here."""
        for key, wanted in list(self._wanted.items()):
            number, round_, owner = key
            stream = self._channel.streams.get(number)
            if stream is not None and stream.is_open(round_):
                left = self._answer(stream, round_, owner, wanted)
                if left:
                    self._wanted[key] = left
                    continue
            del self._wanted[key]

    def _answer(self, stream: Stream, round_: int, owner: int, wanted: Wanted) -> Wanted:
        """Returns what has not come here yet."""
        slot, begin = round_ % stream.slots, int(stream.starts[owner])
        out = stream.outgoing.get((round_, owner))
        sent = out.next if out is not None and out.put else stream.rooms[owner]  # the rest goes out without being asked for
        to: dict[Destination, list[int]] = {}
        lost: dict[int, list[int]] = {}
        later: Wanted = {}
        receivers = set(stream.receivers[owner])
        for index in sorted(wanted):
            if stream.flags[slot, begin + index]:
                if self._channel.sending and not receivers & wanted[index].keys():
                    later[index] = wanted[index]  # a rank that fetches what it did not receive is late anyway
                elif index < sent:
                    for destination in self._destinations(stream, owner, wanted[index]):
                        to.setdefault(destination, []).append(index)
            elif index >= stream.tops[slot, owner]:
                later[index] = wanted[index]
            else:
                for asker in wanted[index]:
                    lost.setdefault(asker, []).append(index)
        for destination, indices in to.items():
            self._send(stream, round_, owner, indices, destination)
        for asker, indices in lost.items() if owner != self._channel.rank else ():
            runs = tuple(index | 1 << 32 for index in indices[:RUNS])
            self._channel.tell(kernels.datagrams.NACK, owner, stream, round_, owner, (0, asker, *runs))
        return later

    def _destinations(self, stream: Stream, owner: int, askers: dict[int, int]) -> Iterable[Destination]:
        group = stream.groups[owner]
        return [group] if group is not None and len(askers) > 1 and max(askers.values()) < DIRECT else askers

    def _send(self, stream: Stream, round_: int, owner: int, indices: list[int], to: Destination) -> None:
        slot, count = round_ % stream.slots, int(stream.counts[round_ % stream.slots, owner])
        known = stream.flags[slot, stream.starts[owner] + count - 1]  # the last datagram tells the length
        nbytes = stream.length(round_, owner) if known else 8 * stream.payload * count
        most = self._channel.burst_datagrams
        for begin in range(0, len(indices), most):
            if self._channel.queued >= QUEUE:
                return
            part = np.array(indices[begin : begin + most])
            self._channel.count("repairs", part.size)
            self._channel.dispatch(stream, round_, owner, nbytes, part, [to])
