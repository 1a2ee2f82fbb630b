"""A channel: streams of transfers between ranks over a medium that may lose, repeat or reorder datagrams.

Each rank drives its channel by `Channel.pump`: it stores what has come, answers, and sends what may be sent.

====================  ====================================================================================================
flow control          a receiver acknowledges what it has, and says how many datagrams may be under way to it: its window,
                      divided by the transfers that come to it at the time. The sender obeys the slowest receiver. So many
                      senders share a receiver's link, and no buffer on the way overflows.
repair                a receiver asks for what is missing, another receiver first, then the sender: whoever has it answers.
                      What several ranks lack is sent again by multicast, once.
lost messages         acknowledgements repeat what earlier ones said. A sender that hears nothing asks.
a rank that hangs     it holds nobody up until all slots of the stream are taken: after `LAGGING_S` a sender goes on without
                      its acknowledgements, and the rank asks for what it has missed when it is back.
security              all datagrams carry a keyed tag; those with a wrong one are counted and dropped, as are replayed ones.
====================  ====================================================================================================

Cost: a datagram of 1500 bytes has 24 bytes of header and tag, and 28 of UDP and IP: 0.965 of the link is payload.
Sources: pgmcc and NORM (RFC 5740) for repair on request of the receiver; window by receivers: as TCP's. How the parts are put
together is ours.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import inf
from typing import Any

import numpy as np

from mpiddl import kernels
from mpiddl.errors import TransportError
from mpiddl.transport.multicast.control import NOBODY, Control, ReplayWindow, packed, unpacked
from mpiddl.transport.multicast.medium import (
    BURST_BYTES,
    BURST_DATAGRAMS,
    DEAF,
    DIFFER,
    HEARING,
    WHOLE,
    Destination,
    Group,
    Medium,
    Received,
)
from mpiddl.transport.multicast.receiving import Receiving
from mpiddl.transport.multicast.repairing import Repairing
from mpiddl.transport.multicast.sending import Sending
from mpiddl.transport.multicast.stream import Stream

WINDOW_BYTES = 192 << 10
"""Under way to one receiver at most. Receive buffers of an ordinary user hold more (212,992 bytes by default, twice that with
what the kernel adds); so does the queue of a switch's port."""

BURSTS = 16
"""Times that this rank receives before it sends."""

BUFFER_WORDS = 2 * 8192
"""For what is received at a time."""

REPEATED = 3
"""Times that a message to all ranks is sent."""

COUNTED = ("placed", "repeated", "own", "late", "early", "forged", "malformed")
"""What the kernel counts (`mpiddl.kernels.multicast.datagrams`)."""


class Channel:
    """The channel of one rank.

    Parameters
    ----------
    medium : Medium
        Closed with the channel.
    key : ndarray of uint64, shape (2,)
        The same on all ranks, and known to nobody else.
    rank, size : int

    Attributes
    ----------
    lock : held while anything of the channel is read or changed, if a thread pumps it.
    unattended : an event, set while the rank itself does not pump.
    streams : those that were made and not dropped, by number.
    hellos : who has been heard at which multicast address, or directly (`WHOLE`, `SHORT`).
    deaf : ranks that get nothing by multicast: what is sent to a group they get directly, too.
    differing : two ranks whose copies of an array differ, as another rank has found; None if no rank has.
    window : datagrams that may be under way to this rank.
    watchers : called, with the lock held, whenever something may have come.
    wake : when a watcher has to be called although nothing comes.
    failure : what has ended the thread that pumped it, or None.
    """

    def __init__(self, medium: Medium, key: np.ndarray, rank: int, size: int):
        if size > kernels.datagrams.LAST_SENDER + 1:
            raise TransportError(f"multicast: got {size} hosts, expected at most {kernels.datagrams.LAST_SENDER + 1}")
        self.medium, self.rank, self.size = medium, rank, size
        self._key = key.copy()  # kernels compile once more for an array that cannot be written
        self.payload = medium.datagram_bytes // 8 - kernels.datagrams.OVERHEAD
        self.window = max(min(WINDOW_BYTES, medium.buffer_bytes // 2) // medium.datagram_bytes, 4)
        self.burst_datagrams, self.prompt = min(BURST_DATAGRAMS, BURST_BYTES // medium.datagram_bytes), medium.prompt
        self.lock, self.unattended = threading.RLock(), threading.Event()
        self.unattended.set()
        self.streams: dict[int, Stream] = {}
        self.hellos: set[tuple[int, int]] = set()
        self.deaf: set[int] = set()
        self.differing: tuple[int, ...] | None = None
        self.watchers: list[Callable[[], None]] = []
        self.wake: float = inf
        self.failure: BaseException | None = None
        self._counts: Counter[str] = Counter()
        self._nothing = Stream(kernels.datagrams.LAST_STREAM, [0] * size, [()] * size, [None] * size, 1, self.payload)
        self._made, self._sequence = 0, count(1)
        self._replays = [ReplayWindow() for _ in range(size)]
        self._queue: deque[tuple[np.ndarray, int, Destination]] = deque()
        self._buffer = np.zeros(BUFFER_WORDS, np.uint64)
        self._burst = np.zeros(BURST_BYTES // 8 + 1, np.uint64)
        self._sending, self._receiving, self._repairing = Sending(self), Receiving(self), Repairing(self)

    # For the user of a channel; with `lock` held, where a thread pumps it.

    def stream(self, sizes: Sequence[int], receivers: Sequence[Sequence[int]], groups: Sequence[Group | None], slots: int,
               memory: np.ndarray | None = None, lasting: bool = False, everyone: Group | None = None) -> Stream:
        """A new stream (`Stream`). All ranks make the same ones, in the same order, and none sends before all have made it."""
        with self.lock:
            if self._made >= kernels.datagrams.LAST_STREAM:  # numbers are not used twice: old datagrams would be taken
                raise TransportError(f"multicast: got {self._made + 1} streams, expected at most {self._made} in a channel")
            made = Stream(self._made, sizes, receivers, groups, slots, self.payload, memory, lasting, everyone)
            self.streams[made.number] = made
            self._made += 1
        return made

    def drop(self, stream: Stream) -> None:
        """Forget a stream, of which this rank needs no more, and others need nothing of this rank (`Stream.idle_since`)."""
        with self.lock:
            self._nothing.counters += stream.counters
            self.streams.pop(stream.number, None)
            self._sending.forget(stream)

    def put(self, stream: Stream, round_: int, nbytes: int, owner: int | None = None) -> None:
        """Send what the caller has written into ``stream.view(round_, owner)``; in place of ``owner``, if that is another rank.

        The round is open (`Stream.is_open`).
        """
        if round_ > kernels.datagrams.LAST_ROUND:
            raise TransportError(f"multicast: round: got {round_}, expected at most {kernels.datagrams.LAST_ROUND}")
        stream.check_room(round_, self.rank if owner is None else owner, nbytes)
        self._sending.put(stream, round_, nbytes, self.rank if owner is None else owner)

    def release(self, stream: Stream, round_: int) -> None:
        """This rank has used all of the round that it will use."""
        stream.used_to = stream.used_by[self.rank] = max(stream.used_to, round_ + 1)
        self.advance(stream)

    def fetch(self, stream: Stream, round_: int, owner: int) -> None:
        """Get a full transfer whose receiver this rank is not, of whoever has it. For a lasting stream."""
        self._receiving.fetch(stream, round_, owner, self.now())

    def want_room(self, stream: Stream, round_: int) -> None:
        """Note whether this rank waits for a slot: after a while it asks whom it waits for."""
        stream.wanted_since = None if stream.open_since(round_) is not None else self.now()

    def leave(self) -> None:
        """Tell all that this rank needs no more, and need not be waited for."""
        for number in self.streams:
            for rank in range(self.size):
                if rank != self.rank:
                    self._give_up(number, rank)

    def hello(self, to: Destination, what: int, numbers: tuple[int, ...] = ()) -> None:
        """Send a message that belongs to no stream: to a multicast address, with its number, or to one rank (`WHOLE` etc.).

        Those to addresses and `WHOLE` are as long as any datagram.
        """
        values = what, *numbers, *[0] * (self.payload - 2 if what <= WHOLE else 0)
        message = Control(kernels.datagrams.HELLO, self.rank, kernels.datagrams.LAST_STREAM, 0, NOBODY, values)
        self._tell(message, to)

    def pump(self) -> None:
        """Store what has come, answer it, and send what may be sent, as far as that goes without waiting."""
        if self.failure is not None:
            raise self.failure
        with self.lock:
            self._receiving.look_anew()
            self._receive()
            for watcher in self.watchers:
                watcher()
            now = self.now()
            for stream in list(self.streams.values()):
                self._sending.remind(stream, now)
                self.advance(stream)
                self._receiving.remind(stream, now)
            self._repairing.answer()
            while self._queue and self.medium.send(*self._queue[0]):
                self._queue.popleft()
            self._sending.send(now)
            self.medium.flush()

    @contextmanager
    def attended(self) -> Iterator[None]:
        """The caller pumps: a thread need not."""
        try:
            self.unattended.clear()
            yield
        finally:
            self.unattended.set()

    def limit_window(self, datagrams: int) -> None:
        """Let no more be under way to this rank: other ranks can take no more."""
        self.window = min(self.window, datagrams)

    def pause(self) -> float:
        """Seconds until there is something to do if nothing comes."""
        with self.lock:
            deadlines = [each.deadline for stream in self.streams.values()
                         for kept in (stream.incoming, stream.outgoing) for each in kept.values()]
            return max(min([self.wake, *deadlines]) - self.now(), 0.0)

    def figures(self) -> dict[str, int]:
        """What was counted so far: datagrams that came, by what became of them, and that were sent, by kind."""
        totals = sum((stream.counters for stream in self.streams.values()), self._nothing.counters)
        return dict(zip(COUNTED, totals.tolist(), strict=True)) | self._counts

    def close(self) -> None:
        """Give the medium back."""
        with self.lock:
            self.streams.clear()
            self._queue.clear()
            self.medium.close()

    # For its parts (`mpiddl.transport.multicast.outlet`)

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def sending(self) -> bool:
        return self._sending.busy

    def now(self) -> float:
        return self.medium.now()

    def departed(self) -> float:
        return self.medium.departed()

    def count(self, what: str, number: int = 1) -> None:
        self._counts[what] += int(number)

    def rejoin(self) -> None:
        """Join again: multicast does not come any more."""
        self.count("rejoined")
        self.medium.rejoin()

    def tell_all(self, what: int, numbers: tuple[int, ...] = ()) -> None:
        """Send `DEAF`, `HEARING` or `DIFFER` to each rank, several times: a message may get lost."""
        for _ in range(REPEATED):
            for rank in range(self.size):
                if rank != self.rank:
                    self.hello(rank, what, numbers)

    def tell(self, kind: int, to: Destination, stream: Stream, round_: int, owner: int, values: tuple[int, ...]) -> None:
        """Send a control message, which may get lost."""
        if to != self.rank:
            self.count({kernels.datagrams.ACK: "acks", kernels.datagrams.NACK: "nacks"}.get(kind, "probes"))
            self._tell(Control(kind, self.rank, stream.number, round_, owner, values), to)

    def dispatch(self, stream: Stream, round_: int, owner: int, nbytes: int, indices: np.ndarray,
                 to: Sequence[Destination]) -> None:
        """Send datagrams of a transfer in one burst, to each of these."""
        begin = int(stream.starts[owner]) * stream.payload
        length = kernels.datagrams.write(self._burst, self._key, round_, owner, stream.number,
                                         stream.data[round_ % stream.slots, begin:], nbytes, stream.payload, indices)
        burst = self._burst.view(np.uint8)[:length]
        if self.deaf and any(isinstance(destination, Group) for destination in to):
            to = [*to, *(rank for rank in stream.receivers[owner] if rank in self.deaf and rank not in to)]
        for destination in to:
            if self._queue or not self.medium.send(burst, self.medium.datagram_bytes, destination):
                self._queue.append((burst.copy(), self.medium.datagram_bytes, destination))

    def advance(self, stream: Stream) -> None:
        """Free slots, and tell the senders early enough."""
        if stream.advance():
            stream.opened = max(stream.opened, self.now())
        untold = max(stream.base - stream.told[0], stream.used_to - stream.told[1])
        if untold >= (1 if stream.lasting else max(stream.slots // 2, 1)):
            stream.told = stream.base, stream.used_to
            to: Iterable[Destination] = range(self.size) if stream.lasting else stream.senders[self.rank]
            self._receiving.acknowledge(stream, stream.base, NOBODY, [stream.everyone] if stream.everyone is not None else to)

    def _tell(self, message: Control, to: Destination) -> None:
        datagram = packed(message, next(self._sequence), self._key)
        self.medium.send(datagram.view(np.uint8), 8 * datagram.size, to)

    def _receive(self) -> None:
        for _ in range(BURSTS):
            if not (parts := self.medium.receive(self._buffer)):
                return
            for part in parts:
                self._take(part, self._buffer[part.begin // 8 :])

    def _take(self, got: Received, burst: np.ndarray) -> None:
        """Datagrams of one sender."""
        number, segment = 0, got.segment
        if not got.nbytes:
            self._nothing.counters[COUNTED.index("malformed")] += 1
        touched = set()
        while number * segment < got.nbytes:
            stream = self.streams.get(stream_of(burst[number * segment // 8]), self._nothing)
            touched.add(stream)
            number, why = self._store(stream, burst, got.nbytes, segment, number)
            if why == kernels.datagrams.OTHER:
                begin, length = number * segment // 8, min(segment, got.nbytes - number * segment) // 8
                number += self._handle(burst[begin : begin + length], stream, got.source)
        for stream in touched:
            self._receiving.note(stream, got.source if got.multicast else -1, self.now())

    def _store(self, stream: Stream, burst: np.ndarray, nbytes: int, segment: int, number: int) -> tuple[int, int]:
        number, why = kernels.datagrams.store(
            burst, nbytes, segment, number, self._key, self.rank, stream.number, stream.payload, stream.starts,
            stream.rooms, stream.data, stream.flags, stream.there, stream.counts, stream.lengths, stream.tops, stream.base,
            stream.counters)
        return int(number), int(why)

    def _handle(self, datagram: np.ndarray, asked: Stream, source: int) -> bool:
        """A datagram with a right tag that is not data of ``asked``; False for data of a stream that has to be asked."""
        kind, number = int(datagram[1]) & 15, stream_of(datagram[0])
        if kind == kernels.datagrams.DATA:
            other = self.streams.get(number)
            if other is None:
                self.count("unknown")
            return other is None or other is asked
        found = unpacked(datagram)
        if found is None or found[0].sender != source:
            self.count("unknown")
        elif source != self.rank:
            message, sequence = found
            if self._replays[source].is_new(sequence):
                self._obey(message)
            else:
                self.count("replayed")
        return True

    def _obey(self, message: Control) -> None:
        """A control message of another rank."""
        stream, now = self.streams.get(message.stream), self.now()
        self._sending.heard(message.sender, now)
        if message.kind == kernels.datagrams.HELLO and message.values and message.values[0] <= DIFFER:
            self._hear(message.sender, *message.values)
        elif stream is None and message.stream < self._made:
            if message.kind == kernels.datagrams.PROBE:  # the last acknowledgement has got lost
                self._give_up(message.stream, message.sender)
        elif stream is None or not (message.owner < self.size or message.owner == NOBODY):
            self.count("unknown")
        elif message.kind == kernels.datagrams.ACK:
            self._sending.on_ack(stream, message, now)
        elif message.kind == kernels.datagrams.NACK:
            self._repairing.on_nack(stream, message)
        elif message.kind == kernels.datagrams.PROBE:
            self._receiving.on_probe(stream, message, now)
        else:
            self.count("unknown")


    def _hear(self, sender: int, what: int, *numbers: int) -> None:
        """A message that belongs to no stream."""
        if what == DEAF:
            self.deaf.add(sender)
        elif what == HEARING:
            self.deaf.discard(sender)
        elif what != DIFFER:
            self.hellos.add((sender, what))
        elif len(numbers) == 2:
            self.differing = numbers

    def _give_up(self, stream: int, rank: int) -> None:
        """Tell a rank that this one needs no more of a stream."""
        never = kernels.datagrams.LAST_ROUND + 1
        self._tell(Control(kernels.datagrams.ACK, self.rank, stream, 0, NOBODY, (0, 1, never, never)), rank)


def stream_of(word: np.uint64) -> int:
    """The number of the stream, from the first word of a datagram."""
    return int(word) >> kernels.datagrams.STREAM_SHIFT


def state(channel: Channel) -> Any:
    """What a channel waits for, in a few words."""
    return {stream.number: (stream.base, sorted(stream.incoming), sorted(stream.outgoing))
            for stream in channel.streams.values()}
