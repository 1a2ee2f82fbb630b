"""The sending side of a channel: transfers go out in the order in which they were put, as fast as their receivers allow."""

from __future__ import annotations

from collections import deque
from math import inf

import numpy as np

from mpiddl import kernels
from mpiddl.transport.multicast.control import NOBODY, Control
from mpiddl.transport.multicast.outlet import Outlet
from mpiddl.transport.multicast.stream import Stream
from mpiddl.transport.multicast.transfers import LAGGING_S, Outgoing

LONGEST_PAUSE_S = 0.5
"""Between two questions to the same receiver."""


class Sending:
    """Of one channel. Its methods are called with the lock of the channel held."""

    def __init__(self, channel: Outlet):
        self._channel = channel
        self._waiting: deque[tuple[Stream, Outgoing]] = deque()
        self._heard = [0.0] * channel.size

    def put(self, stream: Stream, round_: int, nbytes: int, owner: int) -> None:
        """Take a transfer, which is in the memory of the stream."""
        datagrams = stream.fill(round_, owner, nbytes)
        if not stream.receivers[owner]:
            return
        out = self._outgoing(stream, round_, owner)
        out.put, out.count, out.nbytes = True, datagrams, nbytes
        if not self._finish(stream, out):
            self._waiting.append((stream, out))

    def heard(self, rank: int, now: float) -> None:
        """A rank has said something."""
        self._heard[rank] = now

    def on_ack(self, stream: Stream, message: Control, now: float) -> None:
        """What a receiver has."""
        if len(message.values) != 3:
            return
        got, window, base = message.values
        stream.bases[message.sender] = max(stream.bases[message.sender], base)
        if message.owner != NOBODY and stream.is_open(message.round) and message.sender in stream.receivers[message.owner]:
            out = self._outgoing(stream, message.round, message.owner)
            out.windows[message.sender] = max(window, 1)
            if got > out.got[message.sender]:
                out.got[message.sender] = got
                if out.put and out.next:
                    out.wait_for_news(now)
        for out in list(stream.outgoing.values()):
            if out.put:
                self._finish(stream, out)

    def send(self, now: float) -> None:
        """Bursts of the oldest transfer, as long as the windows of its receivers and the medium have room."""
        while self._waiting and not self._channel.queued:
            stream, out = self._waiting[0]
            if stream.outgoing.get((out.round, out.owner)) is not out or out.next >= out.count:
                self._waiting.popleft()
                continue
            if not out.next:  # who was silent up to now had nothing to say
                self._heard = [max(heard, now) for heard in self._heard]
            if not (number := self._allowed(stream, out, now)):
                if out.deadline == inf:
                    out.wait_for_news(now)
                return
            group = stream.groups[out.owner]
            self._channel.dispatch(stream, out.round, out.owner, out.nbytes, np.arange(out.next, out.next + number),
                                   [group] if group is not None else list(stream.receivers[out.owner]))
            self._channel.count("sent", number)
            out.next += number
            if out.deadline == inf or out.next == out.count:
                out.wait_for_news(now)

    def remind(self, stream: Stream, now: float) -> None:
        """Ask receivers that are silent what they have."""
        for out in list(stream.outgoing.values()):
            if out.put and now >= out.deadline:
                silent = [rank for rank in self._behind(stream, out) if now - self._heard[rank] >= out.pause]
                out.pause = min(2 * out.pause, LONGEST_PAUSE_S) if silent else out.pause
                out.deadline = now + out.pause
                for rank in silent:
                    self._channel.tell(kernels.datagrams.PROBE, rank, stream, out.round, out.owner, (out.next, out.count))

    def forget(self, stream: Stream) -> None:
        """Send no more of it."""
        self._waiting = deque((its, out) for its, out in self._waiting if its is not stream)

    def _outgoing(self, stream: Stream, round_: int, owner: int) -> Outgoing:
        return stream.outgoing.setdefault((round_, owner), Outgoing(round_, owner, dict.fromkeys(stream.receivers[owner], 0)))

    def _behind(self, stream: Stream, out: Outgoing) -> list[int]:
        """Receivers that need more of a transfer."""
        return [rank for rank, got in out.got.items() if got < out.count and stream.bases[rank] <= out.round]

    def _finish(self, stream: Stream, out: Outgoing) -> bool:
        """Forget a transfer, if nobody needs more of it."""
        if self._behind(stream, out):
            return False
        stream.outgoing.pop((out.round, out.owner), None)
        stream.finished = max(stream.finished, self._channel.now())
        self._channel.advance(stream)
        return True

    def _allowed(self, stream: Stream, out: Outgoing, now: float) -> int:
        """Datagrams of a transfer that may be sent now: so many that no receiver has more under way than its window."""
        room = left = out.count - out.next
        window = usual = self._channel.window // stream.share or 1
        mine = [each for each in stream.outgoing.values() if each.put and each.next]
        for rank in self._behind(stream, out):
            if now - self._heard[rank] < LAGGING_S:
                if stream.bases[rank] <= out.round - stream.slots:
                    return 0
                under_way = sum(each.next - got for each in mine if (got := each.got.get(rank, each.next)) < each.next)
                allowed = out.windows.get(rank, usual)
                window, room = min(window, allowed), min(room, allowed - under_way)
        return min(room, self._channel.burst_datagrams) if room >= min(left, max(window // 4, 1)) else 0
