"""A medium in simulated time that loses, repeats, delays and forges datagrams, and carries one copy to all members."""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np

from mpiddl.transport.multicast.channel import Channel, state
from mpiddl.transport.multicast.medium import Group, Received

KEY = np.array([0x0123456789ABCDEF, 0xFEDCBA9876543210], np.uint64)


class Network:
    """``loss``, ``repeat``, ``reorder``: shares of all datagrams; ``rate``: bytes a second that a link carries each way."""

    def __init__(self, size, seed=0, loss=0.0, repeat=0.0, reorder=0.0, rate=25e6, latency=1e-4, datagram_bytes=1472,
                 buffer_bytes=425_984, queue_bytes=10**9):
        self.size, self.loss, self.repeat, self.reorder, self.rate = size, loss, repeat, reorder, rate
        self.latency, self.datagram_bytes = latency, datagram_bytes
        self.buffer_bytes, self.queue_bytes = buffer_bytes, queue_bytes
        self.clock, self.draws = 0.0, np.random.default_rng(seed)
        self.events, self.numbers = [], count()
        self.members = {}
        self.inboxes = [[] for _ in range(size)]
        self.egress, self.ingress = [0.0] * size, [0.0] * size
        self.sent = [0] * size
        self.dropped, self.deaf = 0, set()
        self.wiretap = []
        self.channels = [Channel(Link(self, rank), KEY.copy(), rank, size) for rank in range(size)]

    def join(self, group, ranks):
        self.members.setdefault(group.number, set()).update(ranks)

    def carry(self, source, burst, segment, to):
        data = bytes(burst)
        self.sent[source] += len(data)
        self.egress[source] = max(self.egress[source], self.clock) + len(data) / self.rate
        targets = [to] if not isinstance(to, Group) else sorted(self.members.get(to.number, set()) - {source})
        for rank in targets:
            for begin in range(0, len(data), segment):
                datagram = data[begin : begin + segment]
                self.wiretap.append((rank, datagram))
                if rank in self.deaf and isinstance(to, Group):
                    self.dropped += 1
                    continue
                for _ in range(1 + (self.draws.random() < self.repeat)):
                    if self.draws.random() < self.loss:
                        self.dropped += 1
                        continue
                    late = self.draws.random() * 0.01 if self.draws.random() < self.reorder else 0.0
                    backlog = max(self.ingress[rank] - self.egress[source], 0.0) * self.rate
                    if backlog > self.queue_bytes:
                        self.dropped += 1
                        continue
                    self.ingress[rank] = max(self.ingress[rank], self.egress[source]) + len(datagram) / self.rate
                    arrival = self.ingress[rank] + self.latency + late
                    self.at(arrival, self.deliver, rank, datagram, source, isinstance(to, Group))

    def at(self, when, call, *arguments):
        heapq.heappush(self.events, (when, next(self.numbers), call, arguments))

    def deliver(self, rank, datagram, source=-1, multicast=False):
        self.inboxes[rank].append((datagram, source, multicast))

    def run(self, over, limit=60.0, hanging=()):
        """Pump all channels but those ``hanging``, event by event, until ``over()``; returns the simulated seconds."""
        idle = 0
        while True:
            if over():
                return self.clock
            for channel in self.channels:
                if channel.rank not in hanging:
                    channel.pump()
            waits = [channel.pause() for channel in self.channels if channel.rank not in hanging]
            steps = [self.clock + wait for wait in waits] + [event[0] for event in self.events[:1]]
            if min(steps) == float("inf"):  # the channels wait for their users, who may have more to send
                idle += 1
                assert idle < 3, f"nothing goes on: {list(map(state, self.channels))}"
                continue
            idle = 0
            self.clock = max(min(steps), self.clock)
            assert self.clock < limit, f"it does not end: {list(map(state, self.channels))}"
            while self.events and self.events[0][0] <= self.clock:
                _, _, call, arguments = heapq.heappop(self.events)
                call(*arguments)


class Link:
    """One rank's view of the network."""

    def __init__(self, network, rank):
        self.network, self.rank = network, rank
        self.datagram_bytes, self.buffer_bytes = network.datagram_bytes, network.buffer_bytes

    def now(self):
        return self.network.clock

    def send(self, burst, segment, to):
        self.network.carry(self.rank, burst, segment, to)
        return True

    def receive(self, buffer):
        inbox = self.network.inboxes[self.rank]
        if not inbox:
            return []
        datagram, source, multicast = inbox.pop(0)
        buffer.view(np.uint8)[: len(datagram)] = np.frombuffer(datagram, np.uint8)
        return [Received(0, len(datagram), max(len(datagram), 1), source, multicast)]

    def wait(self, seconds, to_send):
        raise AssertionError("nobody waits here")

    def rejoin(self):
        self.network.deaf.discard(self.rank)

    def flush(self):
        pass

    def close(self):
        pass
