"""A network in simulated time that carries one copy to all members of a group, and loses, repeats and delays datagrams.

Ranks run programs: generators that yield what they wait for, while their channels are pumped::

    def program(channel):
        stream = channel.stream(...)
        yield lambda: stream.open_since(0)
        ...
        yield Busy(0.5)             # computes for half a second, while a thread pumps its channel
        yield Hangs(0.5)            # and without one
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import inf
from typing import Any, NamedTuple

import numpy as np

from mpiddl.transport.multicast.channel import Channel, state
from mpiddl.transport.multicast.medium import BURST_BYTES, Destination, Group, Received

KEY = np.array([0x0123456789ABCDEF, 0xFEDCBA9876543210], np.uint64)


class Busy(NamedTuple):
    """A program goes on after so many seconds. Its channel is pumped meanwhile."""

    seconds: float


class Hangs(NamedTuple):
    """A program goes on after so many seconds. Its channel is not pumped meanwhile."""

    seconds: float


Program = Iterator[Callable[[], Any] | Busy | Hangs]


class Datagram(NamedTuple):
    """What is on its way: its bytes, the rank whose address it comes from or -1, and whether it was sent to a group."""

    data: bytes
    source: int
    multicast: bool

    @property
    def kind(self) -> int:
        """As `mpiddl.kernels.multicast.datagrams` counts them."""
        return self.data[8] & 15


class Network:
    """The links of ``size`` ranks to one switch, and a channel for each rank.

    loss, repeat, reorder : shares of all datagrams, drawn for each receiver. Those out of order are up to 10 ms late.
    rate, latency : bytes a second that each link carries each way; seconds on the way.
    queue_bytes : what the switch holds for one receiver; more is dropped.
    buffer_bytes : what a receiver holds that has not looked yet; more is dropped.
    key : of the channels.

    Attributes
    ----------
    members : by group, the ranks that the switch sends its datagrams to.
    loses : decides which other datagrams get lost: called with the receiver and the datagram.
    refusing : ranks whose links take no bursts.
    sent, dropped, overflowed : by rank, bytes that it sent, datagrams to it that got lost, and that found a queue full.
    longest_queue : bytes that the switch held for one receiver at most.
    carried : receiver and datagram of all that was delivered, if ``keeps`` is set.
    """

    def __init__(self, size: int, seed: int = 0, loss: float = 0.0, repeat: float = 0.0, reorder: float = 0.0,
                 rate: float = 25e6, latency: float = 1e-4, datagram_bytes: int = 1472, buffer_bytes: int = 425_984,
                 queue_bytes: float = inf, key: np.ndarray = KEY, keeps: bool = False):
        self.clock, self.rate, self.latency, self.keeps = 0.0, rate, latency, keeps
        self.loss, self.repeat, self.reorder, self.queue_bytes = loss, repeat, reorder, queue_bytes
        self.members: dict[int, set[int]] = {}
        self.loses: Callable[[int, Datagram], bool] = lambda rank, datagram: False
        self.refusing: set[int] = set()
        self.sent, self.dropped, self.overflowed, self.longest_queue = [0] * size, [0] * size, [0] * size, 0.0
        self.carried: list[tuple[int, Datagram]] = []
        self._random = np.random.default_rng(seed).random
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()
        self._egress, self._ingress = [0.0] * size, [0.0] * size
        self.links = [Link(self, rank, datagram_bytes, buffer_bytes) for rank in range(size)]
        self.channels = [Channel(link, key.copy(), rank, size) for rank, link in enumerate(self.links)]

    def join(self, group: Group, ranks: Sequence[int]) -> None:
        """The switch learns that these ranks want what is sent to a group."""
        self.members.setdefault(group.number, set()).update(ranks)
        for rank in ranks:
            self.links[rank].joined.add(group.number)

    def forget(self, rank: int) -> None:
        """The switch forgets what a rank has joined."""
        for ranks in self.members.values():
            ranks.discard(rank)

    def carry(self, source: int, burst: np.ndarray, segment: int, to: Destination) -> None:
        """Datagrams of a burst leave the link of their sender, one behind the other."""
        data, leaves = burst.tobytes(), max(self._egress[source], self.clock)
        self.sent[source] += len(data)
        for begin in range(0, len(data), segment):
            datagram = Datagram(data[begin : begin + segment], source, isinstance(to, Group))
            leaves += len(datagram.data) / self.rate
            self.at(leaves, self._switch, datagram, to)
        self._egress[source] = leaves

    def departed(self, rank: int) -> float:
        """When the link of a rank will have carried what it has."""
        return max(self._egress[rank], self.clock)

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call something at a simulated moment."""
        heapq.heappush(self._events, (when, next(self._numbers), call, arguments))

    def deliver(self, rank: int, datagram: Datagram) -> None:
        """Bring a datagram to a receiver, wherever it comes from."""
        if not self.links[rank].take(datagram):
            self.overflowed[rank] += 1
        elif self.keeps:
            self.carried.append((rank, datagram))

    def _switch(self, datagram: Datagram, to: Destination) -> None:
        """A copy for each receiver."""
        ranks = sorted(self.members.get(to.number, set()) - {datagram.source}) if isinstance(to, Group) else [to]
        for rank in ranks:
            for _ in range(1 + (self._random() < self.repeat)):
                if self._random() < self.loss or self.loses(rank, datagram):
                    self.dropped[rank] += 1
                    continue
                late = 0.01 * self._random() if self._random() < self.reorder else 0.0
                queue = max(self._ingress[rank] - self.clock, 0.0) * self.rate
                if queue > self.queue_bytes:
                    self.overflowed[rank] += 1
                    continue
                self.longest_queue = max(self.longest_queue, queue)
                self._ingress[rank] = max(self._ingress[rank], self.clock) + len(datagram.data) / self.rate
                self.at(self._ingress[rank] + self.latency + late, self.deliver, rank, datagram)

    def run(self, programs: Sequence[Program | None], limit_s: float = 60.0) -> float:
        """Drive a program on each rank until all have ended; returns the simulated seconds that this took."""
        began, ranks = self.clock, [Rank(channel, program) for channel, program in zip(self.channels, programs, strict=True)]
        due = ranks
        while True:
            for rank in due:
                rank.go_on(self.clock)
            if all(rank.ended for rank in ranks):
                return self.clock - began
            moments = [rank.next_moment for rank in ranks]
            self.clock = max(min(*moments, self._events[0][0] if self._events else inf), self.clock)
            assert self.clock < limit_s + began, f"after {limit_s} s: {list(map(state, self.channels))}"
            while self._events and self._events[0][0] <= self.clock:
                _, _, call, arguments = heapq.heappop(self._events)
                call(*arguments)
            due = [rank for rank, moment, link in zip(ranks, moments, self.links, strict=True)
                   if moment <= self.clock or (link.inbox and not rank.hangs)]


class Rank:
    """A rank that runs a program."""

    def __init__(self, channel: Channel, program: Program | None):
        self.channel, self.program = channel, program
        self.until: Callable[[], Any] = lambda: True
        self.hangs_until = -inf
        self.next_moment = 0.0

    @property
    def ended(self) -> bool:
        return self.program is None or self.hangs_until == inf

    @property
    def hangs(self) -> bool:
        return self.hangs_until > self.channel.now()

    def go_on(self, now: float) -> None:
        """Pump, and let the program go on as far as it can."""
        self.channel.pump()
        while self.program is not None and _is_so(self.until()):
            self._step(now)
            if self.hangs:
                self.next_moment = self.hangs_until
                return
            self.channel.pump()
        self.next_moment = min(now + max(self.channel.pause(), 0.0), self._wakes)

    def _step(self, now: float) -> None:
        self._wakes, wanted = inf, next(self.program, None)
        if wanted is None:
            self.program = None
        elif isinstance(wanted, (Busy, Hangs)):
            self._wakes = wakes = now + wanted.seconds
            self.until = lambda: self.channel.now() >= wakes
            self.hangs_until = wakes if isinstance(wanted, Hangs) else self.hangs_until
        else:
            self.until = wanted

    _wakes = inf


def _is_so(found: Any) -> bool:
    """What a program waits for is a condition, or a moment, which may be 0.0."""
    return isinstance(found, float) or bool(found)


class Link:
    """The medium of one rank."""

    prompt = False

    def __init__(self, network: Network, rank: int, datagram_bytes: int, buffer_bytes: int):
        self._network, self._rank = network, rank
        self.datagram_bytes, self.buffer_bytes = datagram_bytes, buffer_bytes
        self.joined: set[int] = set()
        self.inbox: list[Datagram] = []
        self._held = 0

    def take(self, datagram: Datagram) -> bool:
        """False where there is no room."""
        self._held += len(datagram.data)
        if self._held > self.buffer_bytes:
            self._held -= len(datagram.data)
            return False
        self.inbox.append(datagram)
        return True

    def now(self) -> float:
        return self._network.clock

    def departed(self) -> float:
        return self._network.departed(self._rank)

    def send(self, burst: np.ndarray, segment: int, to: Destination) -> bool:
        if self._rank in self._network.refusing:
            return False
        self._network.carry(self._rank, burst, segment, to)
        return True

    def receive(self, buffer: np.ndarray) -> list[Received]:
        """As sockets do: datagrams of the same length that come from one sender are one."""
        found: list[Received] = []
        room, begin, taken = buffer.view(np.uint8), 0, 0
        for datagram in self.inbox:
            length, last = len(datagram.data), found[-1] if found else None
            if begin + length > BURST_BYTES:
                break
            room[begin : begin + length] = np.frombuffer(datagram.data, np.uint8)
            if (last is not None and (last.source, last.multicast) == (datagram.source, datagram.multicast)
                    and last.begin + last.nbytes == begin and last.segment == length):
                found[-1] = last._replace(nbytes=last.nbytes + length)
            else:
                found.append(Received(begin, length, max(length, 1), datagram.source, datagram.multicast))
            begin += (length + 7) // 8 * 8
            taken += 1
            self._held -= length
        del self.inbox[:taken]
        return found

    def wait(self, seconds: float, to_send: bool) -> None:
        raise AssertionError("programs wait by what they yield")

    def rejoin(self) -> None:
        for group in self.joined:
            self._network.members.setdefault(group, set()).add(self._rank)

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """There is nothing to give back."""
