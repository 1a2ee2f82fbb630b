"""What collectives over multicast have in common: a channel between hosts, and on each host memory into which it receives.

One rank of each host, its leader, sends and receives. The others write what they send into memory of the host, and read there
what has come. Messages pass through the memory in pieces, several of which are under way at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiddl.errors import TransportError
from mpiddl.node.arena import Arena
from mpiddl.node.topology import neighbours
from mpiddl.progress.started import Queue, Steps
from mpiddl.transport.agree import agreed, tried
from mpiddl.transport.base import Request
from mpiddl.transport.comm import Comm
from mpiddl.transport.multicast.connect import Connection, connect
from mpiddl.transport.multicast.medium import Group
from mpiddl.transport.multicast.stream import Stream

SLOTS = 4
"""Pieces under way."""

PIECE_BYTES = 256 << 10
"""Of one sender; a host has room for `SLOTS` of them from each sender."""

MEMORY_BYTES = 32 << 20
"""Most that the pieces of all senders take on a host, where there are many."""


class Hosts:
    """The channel between the hosts of a communicator. ``link`` is None on ranks that are not leaders.

    A thread serves the channel: a leader may wait for another one that has not got its acknowledgement.
    """

    def __init__(self, comm: Comm, interface: str = ""):
        near = neighbours(comm)
        self.link: Connection | None = None
        if len(near.topology.nodes) == 1:
            raise TransportError("multicast: all ranks are on one host")
        why = ""
        with agreed(comm):
            if near.local.rank == 0:
                try:
                    self.link = connect(near.across, [range(near.across.size)], interface)
                except TransportError as error:  # on all leaders
                    why = str(error)
        if why := near.local.bcast(why):
            raise TransportError(why)
        if self.link is not None:
            self.link.begin_thread()

    def Free(self) -> None:
        """Collective over the leaders."""
        if self.link is not None:
            self.link.Free()


class Pieces(Queue):
    """Memory for the pieces of some hosts, the senders, on every host.

    Attributes
    ----------
    node : which host this rank is on.
    round : of the next piece.
    piece : bytes of a piece that one rank sends.

    Raises
    ------
    SharedMemoryError
        On all ranks: a host has not enough room.
    """

    def __init__(self, comm: Comm, senders: Sequence[int]):
        near = neighbours(comm)
        self._comm, self._link, nodes = comm, hosts(comm).link, near.topology.nodes
        self.node, self.round = near.topology.node(comm.rank), 0
        ranks = [len(node) if len(senders) > 1 else 1 for node in nodes]  # one sender alone: a broadcast of one rank's array
        most = SLOTS * sum(ranks[sender] for sender in senders)
        self.piece = max(8, min(PIECE_BYTES, MEMORY_BYTES // most) // 8 * 8)
        sizes = [self.piece * ranks[node] if node in senders else 0 for node in range(len(nodes))]
        receivers = [[other for other in range(len(nodes)) if other != node] if node in senders else []
                     for node in range(len(nodes))]
        groups = [Group(0)] * len(nodes)
        payload = near.local.bcast(self._link.channel.payload if self._link else 0)
        self._arena = Arena(comm)
        with self._arena.all_or_nothing(), agreed(comm):  # all have it before anything is sent
            memory = self._arena.common("pieces", Stream.memory_bytes(sizes, SLOTS, payload), np.uint8)
            if self._link is not None:
                self._stream = self._link.channel.stream(sizes, receivers, groups, SLOTS, memory)
            else:
                self._stream = Stream(0, sizes, receivers, groups, SLOTS, payload, memory)  # for its layout

    def view(self, round_: int, node: int) -> np.ndarray:
        """Where the piece of a host is: uint8, the parts of its ranks one behind the other."""
        return self._stream.view(round_, node)

    def meet(self) -> Request:
        """A barrier of the ranks of this host."""
        return self._arena.meet("pieces")

    def room(self, round_: int) -> Steps:
        """Wait until the round has a slot."""
        if self._link is not None:
            yield self._link.request(lambda: self._stream.open_since(round_), "room for a piece")

    def put(self, round_: int, nbytes: int) -> None:
        """Send the piece of this host."""
        if self._link is not None:
            with self._link.channel.lock:
                self._link.channel.put(self._stream, round_, nbytes)
                self._link.channel.pump()
            self._comm.meter.sent(nbytes)

    def come(self, round_: int, senders: Sequence[int]) -> Steps:
        """Wait until the pieces of these hosts are here."""
        if self._link is not None:
            yield self._link.request(lambda: self._stream.complete_since(round_, senders), "pieces of other hosts")

    def release(self, round_: int) -> None:
        """The ranks of this host have used the round."""
        if self._link is not None:
            with self._link.channel.lock:
                self._link.channel.release(self._stream, round_)
                self._link.channel.pump()

    def delivered(self) -> Steps:
        """Wait until all hosts have what this one has sent."""
        if self._link is not None:
            yield self._link.request(self._stream.idle_since, "other hosts to have a piece")

    def Free(self) -> None:
        """Collective."""
        self.give_up("the memory for multicast was freed")
        if self._link is not None:
            self._link.channel.drop(self._stream)
        self._arena.Free()


def hosts(comm: Comm) -> Hosts:
    """The channel of ``comm``; collective at the first call.

    Raises
    ------
    TransportError
        On all ranks: multicast does not work here.
    """
    found: Hosts = comm.kept("multicast", lambda: Hosts(comm))
    return found


def works(comm: Comm) -> bool:
    """Whether multicast works between the hosts of ``comm``; if not, rank 0 says so once. Collective at the first call."""
    return tried(comm, "multicast", lambda: hosts(comm), aloud=len(neighbours(comm).topology.nodes) > 1)


def pieces_of(comm: Comm, senders: Sequence[int]) -> Pieces:
    """The memory for pieces of these hosts; collective at the first call."""
    found: Pieces = comm.kept(("pieces", tuple(senders)), lambda: Pieces(comm, senders))
    return found
