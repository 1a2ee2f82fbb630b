"""A stream: in each round, each sender has one message, a transfer, for its receivers.

The memory of a stream is bounded: it has a few slots, which rounds take in turns. A slot has room for the transfers of all
senders. It is free for a later round when this rank has used what it holds and all receivers of this rank's own transfer have
it. So whoever misses a datagram finds it at the sender, and often at another receiver. The slots of a ``lasting`` stream are
free when all ranks have used the round: so a rank that is late finds whatever it needs, as long as it is not later than that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiddl import kernels
from mpiddl.errors import UsageError
from mpiddl.layout import ceil_div
from mpiddl.memory import aligned_zeros
from mpiddl.transport.multicast.medium import Group
from mpiddl.transport.multicast.transfers import Incoming, Outgoing, Pace


class Stream:
    """Rounds of transfers; made by `mpiddl.transport.multicast.channel.Channel.stream`.

    Parameters
    ----------
    number : int
        Of the stream in its channel.
    sizes : sequence of int
        By rank, bytes of its transfers at most.
    receivers : sequence of sequence of int
        By rank, the ranks that receive its transfers.
    groups : sequence of Group or None
        By rank, the multicast address for its transfers; None: a copy for each receiver.
    slots : int
        Rounds that may be open at a time.
    payload : int
        Words of a full datagram.
    memory : ndarray of uint8, optional
        Zeros, `memory_bytes` of them; by default memory of the stream's own.
    lasting : bool
        No rank gives a round up before all ranks have used it.
    everyone : Group, optional
        A multicast address that all ranks have joined, for messages to all of them.

    Attributes
    ----------
    base : the first round that has a slot.
    used_to : rounds before it have been used by this rank.
    bases, used_by : by rank, the same of other ranks, as far as this one knows.
    """

    def __init__(self, number: int, sizes: Sequence[int], receivers: Sequence[Sequence[int]],
                 groups: Sequence[Group | None], slots: int, payload: int, memory: np.ndarray | None = None,
                 lasting: bool = False, everyone: Group | None = None):
        self.number, self.sizes, self.receivers, self.groups = number, list(sizes), list(map(tuple, receivers)), list(groups)
        self.senders = [[sender for sender, its in enumerate(self.receivers) if rank in its] for rank in range(len(sizes))]
        self.share = max(1, *map(len, self.senders))
        self.slots, self.payload = slots, payload
        self.rooms = np.array([ceil_div(size, 8 * payload) or 1 for size in sizes])
        self.starts = np.concatenate([[0], np.cumsum(self.rooms)[:-1]])
        total = int(self.rooms.sum())
        words = memory.view(np.uint64) if memory is not None else aligned_zeros(slots * total * payload, np.uint64)
        self.data = words[: slots * total * payload].reshape(slots, total * payload)
        self.flags = np.zeros((slots, total), np.uint8)
        shape = slots, len(sizes)
        self.there, self.counts, self.tops, self.lengths, self.noted = (np.zeros(shape, np.int64) for _ in range(5))
        self.times, self.finished, self.opened, self.pace = np.zeros(shape), 0.0, 0.0, Pace()
        self.lasting, self.base, self.used_to, self.told = lasting, 0, 0, (0, 0)
        self.everyone = everyone
        self.bases, self.used_by = [0] * len(sizes), [0] * len(sizes)
        self.wanted_since: float | None = None
        self.outgoing: dict[tuple[int, int], Outgoing] = {}
        self.incoming: dict[tuple[int, int], Incoming] = {}
        self.counters = np.zeros(kernels.datagrams.COUNTERS, np.int64)

    @staticmethod
    def memory_bytes(sizes: Sequence[int], slots: int, payload: int) -> int:
        """Bytes of a stream's memory."""
        return slots * 8 * payload * sum(ceil_div(size, 8 * payload) or 1 for size in sizes)

    def view(self, round_: int, sender: int) -> np.ndarray:
        """Where the transfer of ``sender`` is, in the slot of the round: uint8, as many as it may have."""
        begin = int(self.starts[sender]) * self.payload
        return self.data[round_ % self.slots, begin:].view(np.uint8)[: self.sizes[sender]]

    def length(self, round_: int, sender: int) -> int:
        """Bytes of a transfer that is complete."""
        return int(self.lengths[round_ % self.slots, sender])

    def complete_since(self, round_: int, senders: Sequence[int]) -> float | None:
        """Since when all of these transfers are here; None if one is not."""
        slot, times = round_ % self.slots, 0.0
        for sender in senders:
            if not self.complete(round_, sender):
                return None
            times = max(times, self.times.item(slot, sender))
        return times

    def sent_since(self, round_: int, owner: int) -> float | None:
        """Since when all of a transfer that this rank has put has left it; None if it has not."""
        out = self.outgoing.get((round_, owner))
        return self.finished if out is None or not out.put else out.sent  # a late word about it may have come since

    def idle_since(self) -> float | None:
        """Since when nobody lacks anything of this rank."""
        return None if any(out.put for out in self.outgoing.values()) else self.finished

    def open_since(self, round_: int) -> float | None:
        """Since when the round has a slot, or had one."""
        return self.opened if round_ < self.base + self.slots else None

    def is_open(self, round_: int) -> bool:
        """Whether the round has a slot."""
        return self.base <= round_ < self.base + self.slots

    def usual_window(self, window: int) -> int:
        """What a sender may have under way to a receiver that has said nothing yet, of the ``window`` for all its senders."""
        return window // self.share or 1

    def coming(self, rank: int) -> int:
        """Transfers of the first open round that a rank is still to receive."""
        slot, senders = self.base % self.slots, self.senders[rank]
        counts = self.counts[slot, senders]
        return int(np.count_nonzero((self.there[slot, senders] < counts) | (counts == 0)))

    def complete(self, round_: int, sender: int) -> bool:
        """Whether all of a transfer is here."""
        slot = round_ % self.slots
        return self.is_open(round_) and 0 < self.counts.item(slot, sender) == self.there.item(slot, sender)

    def check_room(self, round_: int, owner: int, nbytes: int) -> None:
        """Raise a `UsageError` unless this transfer may be put now."""
        if not self.is_open(round_):
            raise UsageError(f"round: got {round_}, expected {self.base} to {self.base + self.slots - 1}")
        if not 0 <= nbytes <= self.sizes[owner]:
            raise UsageError(f"nbytes: got {nbytes}, expected at most {self.sizes[owner]}")

    def fill(self, round_: int, sender: int, nbytes: int) -> int:
        """Note that the caller has written a transfer into its `view`; returns the number of its datagrams."""
        slot, begin, count = round_ % self.slots, int(self.starts[sender]), max(ceil_div(nbytes, 8 * self.payload), 1)
        words = self.data[slot, begin * self.payload : (begin + count) * self.payload].view(np.uint8)
        words[nbytes : 8 * ceil_div(nbytes, 8)] = 0
        self.flags[slot, begin : begin + count] = 1
        self.there[slot, sender] = self.counts[slot, sender] = self.tops[slot, sender] = self.noted[slot, sender] = count
        self.lengths[slot, sender] = nbytes
        self.incoming.pop((round_, sender), None)
        return count

    def gaps(self, round_: int, sender: int, begin: int, end: int, most: int) -> list[tuple[int, int]]:
        """Runs of datagrams from ``begin`` to ``end`` that are not here, as first and number; ``most`` of them."""
        found = np.empty((most, 2), np.int64)
        number = kernels.datagrams.gaps(self.flags[round_ % self.slots], int(self.starts[sender]), begin, end, found)
        return [(first, length) for first, length in found[:number].tolist()]

    def advance(self) -> bool:
        """Free the slots of the rounds that are over, in order; returns whether there were any."""
        before, sending = self.base, {out.round for out in self.outgoing.values() if out.put}
        free = min([self.used_to, *(self.used_by if self.lasting else ())])
        while self.base < free and self.base not in sending:
            slot = self.base % self.slots
            for array in (self.flags, self.there, self.counts, self.tops, self.lengths, self.noted):
                array[slot] = 0
            for kept in (self.incoming, self.outgoing):
                for key in [key for key in kept if key[0] == self.base]:
                    del kept[key]
            self.base += 1
        return self.base > before
