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
        if any(out.got.values()):  # another rank is sending it in the place of this one
            out.next, out.sent = datagrams, self._channel.now()
            out.wait_for_news(out.sent)
        self._waiting.append((stream, out))

    @property
    def busy(self) -> bool:
        """Whether some transfer is not sent yet."""
        return bool(self._waiting)

    def heard(self, rank: int, now: float) -> None:
        """A rank has said something."""
        self._heard[rank] = now

    def on_ack(self, stream: Stream, message: Control, now: float) -> None:
        """What a receiver has."""
        if len(message.values) != 4:
            return
        got, window, base, used_to = message.values
        stream.bases[message.sender] = max(stream.bases[message.sender], base)
        stream.used_by[message.sender] = max(stream.used_by[message.sender], used_to)
        if message.owner != NOBODY and stream.is_open(message.round) and message.sender in stream.receivers[message.owner]:
            out = self._outgoing(stream, message.round, message.owner)
            out.windows[message.sender] = max(window, 1)
            out.hear(message.sender, got, now)

    def send(self, now: float) -> None:
        """Bursts of the oldest transfer of each stream, as long as the windows of its receivers and the medium have room."""
        left, held = deque[tuple[Stream, Outgoing]](), set[int]()
        for stream, out in self._waiting:
            if stream.number in held or not self._send(stream, out, now):
                held.add(stream.number)
                left.append((stream, out))
        self._waiting = left

    def _send(self, stream: Stream, out: Outgoing, now: float) -> bool:
        """Returns whether nothing of a transfer is left to send."""
        while stream.outgoing.get((out.round, out.owner)) is out and out.next < out.count:
            if self._channel.queued:
                return False
            if not out.next:
                self._begin(stream, out, now)
            if not (number := self._allowed(stream, out, now)):
                if out.deadline == inf:
                    out.wait_for_news(now)
                return False
            group = stream.groups[out.owner]
            self._channel.dispatch(stream, out.round, out.owner, out.nbytes, np.arange(out.next, out.next + number),
                                   [group] if group is not None else list(stream.receivers[out.owner]))
            self._channel.count("sent", number)
            out.was_sent(number, now)
            if out.next == out.count:
                out.sent = self._channel.departed()
        return True

    def _begin(self, stream: Stream, out: Outgoing, now: float) -> None:
        """Receivers that have all of what was sent before had nothing to say up to now."""
        earlier = [each for each in stream.outgoing.values() if each.put and each.next]
        for rank in out.got:
            if not any(each.got.get(rank, each.next) < each.next for each in earlier):
                self._heard[rank] = max(self._heard[rank], now)

    def remind(self, stream: Stream, now: float) -> None:
        """Forget what all receivers have. Ask those of which there are no news, each about the first transfer that it lacks."""
        busy: set[int] = set()
        for out in [out for out in stream.outgoing.values() if out.put]:
            behind = self._behind(stream, out)
            if not behind:
                self._finish(stream, out)
            elif now >= out.deadline:
                out.ask(now)
                for rank in [rank for rank in behind if rank not in busy]:
                    self._channel.tell(kernels.datagrams.PROBE, rank, stream, out.round, out.owner, (out.next, out.count))
            busy.update(behind)

    def forget(self, stream: Stream) -> None:
        """Send no more of it."""
        self._waiting = deque((its, out) for its, out in self._waiting if its is not stream)

    def _outgoing(self, stream: Stream, round_: int, owner: int) -> Outgoing:
        if (round_, owner) not in stream.outgoing:
            got = dict.fromkeys(stream.receivers[owner], 0)
            stream.outgoing[round_, owner] = Outgoing(round_, owner, got, stream.pace)
        return stream.outgoing[round_, owner]

    def _behind(self, stream: Stream, out: Outgoing) -> list[int]:
        """Receivers that need more of a transfer."""
        return [rank for rank, got in out.got.items() if got < out.count and stream.bases[rank] <= out.round]

    def _finish(self, stream: Stream, out: Outgoing) -> None:
        """Forget a transfer of which nobody needs more."""
        stream.outgoing.pop((out.round, out.owner), None)
        stream.finished = max(stream.finished, self._channel.now())
        for other in [other for other in stream.outgoing.values() if other.deadline < inf]:
            other.deadline = min(other.deadline, self._channel.now() + stream.pace.pause)

    def _allowed(self, stream: Stream, out: Outgoing, now: float) -> int:
        """Datagrams of a transfer that may be sent now: so many that no receiver has more under way than its window."""
        room = left = out.count - out.next
        window = usual = stream.usual_window(self._channel.window)
        mine = [each for each in stream.outgoing.values() if each.put and each.next]
        for rank in self._behind(stream, out):
            if self._channel.prompt or now - self._heard[rank] < max(LAGGING_S, 2 * stream.pace.pause):
                if stream.bases[rank] <= out.round - stream.slots:
                    return 0
                under_way = sum(each.next - got for each in mine if (got := each.got.get(rank, each.next)) < each.next)
                allowed = out.windows.get(rank, usual)
                window, room = min(window, allowed), min(room, allowed - under_way)
        return min(room, self._channel.burst_datagrams) if room >= min(left, max(window // 4, 1)) else 0
