"""All-reduce over multicast of arrays of which several ranks hold copies: each rank of a group sends another slice of it.

The n ranks stand in G groups. The members of a group bring the same array, bit for bit. Each multicasts one slice to all ranks
outside its group. Every rank adds up the arrays of all groups in the order of the groups, so that all have the same bits.

A member that is late is not waited for: when another member has sent its own slice, it sends that of the late one, too. A late
rank that finds the round begun needs no array of its own: it fetches the slices of its group from the others (`begun`). No rank
can be more than `slots` rounds late; then the others wait for it.

Cost, V = size of an array: V/r sent by each rank of a group of r, G V in all; (G - 1) V received by each rank. If one member of
a group is late, another one sends its slice as well. Memory: ``slots`` times G V.
Source: ours; the bytes are those of the lower bound for coded multicast (`mpiddl.coding.loads`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from mpiddl.collectives.copies import checked, checksum, compare, watched
from mpiddl.errors import UsageError
from mpiddl.layout import block_bounds, pieces
from mpiddl.memory import aligned_zeros
from mpiddl.progress.started import Queue, Steps, run
from mpiddl.transport.base import Request
from mpiddl.transport.comm import Comm
from mpiddl.transport.multicast.connect import Connection, connect
from mpiddl.transport.multicast.medium import Group
from mpiddl.transport.multicast.stream import Stream

MOST_ADDRESSES = 19
"""Beside that of all ranks. A socket joins no more than 20 (net.ipv4.igmp_max_memberships)."""

CACHED_BYTES = 128 << 10
"""Arrays are added up in parts of this size, which stay in the cache."""

NOTE_BYTES = 8

RATE = 1e7
"""Bytes a second of a link, until it was measured."""

SHORTEST_S = 0.002
"""A rank that is less late than that is not late."""


class ReplicatedMulticast(Queue):
    """The all-reduce of one communicator, for arrays of one size.

    Parameters
    ----------
    comm : Comm
    owners : sequence of sequence of int
        The ranks of each group; each rank is in one group.
    size, dtype :
        Of the arrays.
    slots : int
        Rounds that may be under way, at least 2.
    interface : str
        See `mpiddl.transport.multicast.connect.connect`.

    Attributes
    ----------
    result : ndarray, shape (size,)
        The sum, valid until the next call; in the memory that was given for it, if any was.
    late : Counter
        By rank, rounds in which this rank has sent the slice of that one.

    Raises
    ------
    TransportError
        On all ranks: multicast does not work here.

    Communication
    -------------
    Making it is collective.
    """

    def __init__(self, comm: Comm, owners: Sequence[Sequence[int]], size: int, dtype: np.dtype, slots: int = 4,
                 interface: str = "", result: np.ndarray | None = None):
        if sorted(rank for members in owners for rank in members) != list(range(comm.size)) or slots < 2:
            raise UsageError(f"owners, slots: got {owners} and {slots}, expected each of {comm.size} ranks once, and 2 or more")
        self._comm, self._owners, self._round = comm, [tuple(members) for members in owners], 0
        self._group = next(number for number, members in enumerate(self._owners) if comm.rank in members)
        self._mates = [rank for rank in self._owners[self._group] if rank != comm.rank]
        self._outside = [rank for rank in range(comm.size) if rank not in self._owners[self._group]]
        self._slices = [slice(*block_bounds(size, len(members), place)) for members in self._owners
                        for place in range(len(members))]
        self._slices = [self._slices[place] for place in np.argsort([rank for members in self._owners for rank in members])]
        self.result, self.late = aligned_zeros(size, dtype) if result is None else result, Counter[int]()
        self._link = self._connect(interface)
        itemsize = dtype.itemsize
        sizes = [(part.stop - part.start) * itemsize for part in self._slices]
        outside = [[rank for rank in range(comm.size) if rank not in members] for members in self._owners]
        homes = [next(number for number, members in enumerate(self._owners) if rank in members) for rank in range(comm.size)]
        groups = [Group(1 + home if len(self._owners) <= MOST_ADDRESSES else 0) for home in homes]
        self._stream = self._link.channel.stream(sizes, [outside[home] for home in homes], groups, slots,
                                                 lasting=True, everyone=Group(0))
        mates = [[other for other in self._owners[home] if other != rank] for rank, home in enumerate(homes)]
        self._notes = self._link.channel.stream([NOTE_BYTES] * comm.size, mates, [None] * comm.size, slots)
        self._tolerant, self._brought, self._rate = not self._link.timeless, 0.0, RATE
        comm.patient_barrier()
        self._link.begin_thread()

    def _connect(self, interface: str) -> Connection:
        """One multicast address for each group, which its members do not join: they hold what is sent there."""
        everyone = range(self._comm.size)
        outside = [[rank for rank in everyone if rank not in members] for members in self._owners]
        return connect(self._comm, [everyone, *(outside if len(outside) <= MOST_ADDRESSES else ())], interface)

    def begun(self, seconds: float) -> bool:
        """Whether this rank need not bring its array of the coming round, which it would take so many seconds to make: another
        member of the group has brought it, and it takes less time to fetch it."""
        if not self._tolerant or seconds <= self.result.nbytes / self._rate:
            return False
        self._link.serve()
        with self._link.channel.lock:
            return any(self._has_brought(self._round, mate) for mate in self._mates)

    def __call__(self, array: np.ndarray | None) -> np.ndarray:
        """The sum of the arrays of all groups. None: another member has brought the array (`begun`)."""
        array = None if array is None else checked(array, self.result)
        run(self._comm, (), self._steps(array), True, self)
        return self.result

    def _has_brought(self, round_: int, mate: int) -> bool:
        since = self._notes.complete_since(round_, [mate])
        return since is not None and since <= self._link.channel.now()

    def _steps(self, array: np.ndarray | None) -> Steps:
        round_, channel = self._round, self._link.channel
        self._round += 1
        yield self._room(self._stream, round_)
        yield self._room(self._notes, round_)
        if array is not None:
            number = checksum(array, round_)
            with channel.lock:
                self._notes.view(round_, self._comm.rank).view(np.int64)[0] = number
                channel.put(self._notes, round_, NOTE_BYTES)
            self._brought = self._comm.now()
            for owner in [self._comm.rank] if self._outside else range(self._comm.size):
                self._put(array, round_, owner)
            if self._outside and self._mates and self._tolerant:
                yield self._request(lambda: self._patience(round_), "the other members of its group")
                self._help(array, round_)
            self._compare(number, round_)
        yield self._request(lambda: self._stream.complete_since(round_, self._outside), "slices of other ranks")
        if array is None:  # only now: what others wait for comes first
            with channel.lock:
                for member in self._owners[self._group]:
                    channel.fetch(self._stream, round_, member)
            yield self._request(lambda: self._stream.complete_since(round_, range(self._comm.size)), "slices of its group")
        self._add_up(array, round_)
        with channel.lock:
            channel.release(self._stream, round_)
            channel.release(self._notes, round_)
            channel.pump()

    def _put(self, array: np.ndarray, round_: int, owner: int) -> None:
        """Send a slice of this group's array."""
        channel, part = self._link.channel, array[self._slices[owner]].view(np.uint8)
        with channel.lock:
            self._stream.view(round_, owner)[:] = part
            channel.put(self._stream, round_, part.size, owner)
            channel.pump()
        if self._outside:
            self._comm.meter.sent(part.size)

    def _patience(self, round_: int) -> float | None:
        """Since when its own slice is sent, and the others of the group have brought theirs or are late.

        Late is who is later than it takes to send a slice: up to then, waiting costs less than sending it for another rank.
        """
        sent = self._stream.sent_since(round_, self._comm.rank)
        brought = self._notes.complete_since(round_, self._mates)
        if sent is None or brought is not None:
            return sent
        part = self._slices[self._comm.rank]
        nbytes = (part.stop - part.start) * self.result.itemsize
        self._rate = max(self._rate, nbytes / max(sent - self._brought, SHORTEST_S))
        moment = max(sent, self._brought + nbytes / self._rate + SHORTEST_S)
        return moment if self._comm.simulated or self._link.channel.now() >= moment else None

    def _help(self, array: np.ndarray, round_: int) -> None:
        """Send the slices of the members after this one, in a circle, up to the first one that is on time."""
        place = self._owners[self._group].index(self._comm.rank)
        for mate in (*self._owners[self._group][place + 1 :], *self._owners[self._group][:place]):
            with self._link.channel.lock:
                if self._has_brought(round_, mate):
                    break
            self.late[mate] += 1
            self._put(array, round_, mate)

    def _compare(self, number: int, round_: int) -> None:
        """The copies of the group, as far as they are there."""
        with self._link.channel.lock:
            for mate in self._mates:
                if number and self._notes.complete(round_, mate):
                    theirs = self._notes.view(round_, mate).view(np.int64).item()
                    compare(self._link.channel, self._comm.rank, number, mate, theirs)

    def _add_up(self, array: np.ndarray | None, round_: int) -> None:
        """In the order of the groups, on every rank."""
        whole: list[list[tuple[slice, np.ndarray]]] = []
        for number, members in enumerate(self._owners):
            if number == self._group and array is not None:
                whole.append([(slice(0, array.size), array)])
            else:
                views = {rank: self._stream.view(round_, rank).view(self.result.dtype) for rank in members}
                whole.append([(self._slices[rank], view) for rank, view in views.items()])
        for number, parts in enumerate(whole):
            for where, values in parts:
                for piece in pieces(values.size, CACHED_BYTES // self.result.itemsize):
                    target = self.result[where][piece]
                    if number:
                        np.add(target, values[piece], out=target)
                    else:
                        target[:] = values[piece]

    def _room(self, stream: Stream, round_: int) -> Request:
        with self._link.channel.lock:
            self._link.channel.want_room(stream, round_)
        return self._request(lambda: stream.open_since(round_), "ranks that are many rounds late")

    def _request(self, since: Callable[[], float | None], what: str) -> Request:
        return self._link.request(watched(self._link.channel, since), what)

    def Free(self) -> None:
        """Collective: all ranks have what they need."""
        self._link.Free()
