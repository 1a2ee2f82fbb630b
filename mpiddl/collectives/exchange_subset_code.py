"""All block gradients for every rank, coded: the published exchange of coded synchronous SGD, over multicast.

Each rank has computed some blocks (`mpiddl.coding.placements.all_subsets`). It sends its packets (`mpiddl.coding.subset_code`),
each of which gives r ranks a different piece. A rank decodes the packets that are for it and ignores the others.

Cost, V = size of a gradient: each rank sends C(n-1, r) packets of V/r and a header; every other rank receives all of them,
since they go to one multicast address. With ``turns`` one rank sends at a time, as the published analysis has it. Memory:
`SLOTS` packets of each rank, and the blocks that this rank does not compute. Where multicast does not work, a rank sends each
packet r times, by MPI, to those it is for.
Source: as `mpiddl.coding.subset_code`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from mpiddl.coding.subset_code import SubsetCode
from mpiddl.coding.subset_decoder import SubsetDecoder
from mpiddl.collectives.wire import Wire
from mpiddl.errors import TransportError
from mpiddl.progress.started import Queue, Steps, run
from mpiddl.transport.comm import Comm
from mpiddl.transport.multicast.connect import Connection, connect
from mpiddl.transport.multicast.medium import Group
from mpiddl.transport.multicast.stream import Stream

SLOTS = 4
"""Packets of a rank that are under way."""


class SubsetExchange(Queue):
    """The exchange of one communicator, for gradients of one size.

    Parameters
    ----------
    comm : Comm
    code : SubsetCode
        Of as many workers as ``comm`` has ranks.
    words : int
        32-bit words of a gradient.
    turns : bool
        One rank sends at a time.
    interface : str
        See `mpiddl.transport.multicast.connect.connect`.

    Attributes
    ----------
    trouble : str
        Why multicast does not work here, or "".

    Communication
    -------------
    Making it is collective.
    """

    def __init__(self, comm: Comm, code: SubsetCode, words: int, turns: bool = False, interface: str = ""):
        self._comm, self._code, self._turns = comm, code, turns
        self._words, everyone = code.packet_words(words), range(comm.size)
        self._wire = Wire(comm.Create(everyone))
        self.trouble, self._link = "", None
        try:
            self._link = connect(comm, [everyone], interface)
        except TransportError as error:
            self.trouble = str(error)
            return
        senders = [[rank] for rank in everyone] if turns else [list(everyone)]
        self._streams = [self._stream(self._link, each) for each in senders]
        self._rounds = [0] * len(self._streams)
        comm.patient_barrier()
        self._link.begin_thread()

    def _stream(self, link: Connection, senders: list[int]) -> Stream:
        everyone, nbytes = range(self._comm.size), 4 * self._words
        sizes = [nbytes if rank in senders else 0 for rank in everyone]
        receivers = [[other for other in everyone if other != rank] if rank in senders else [] for rank in everyone]
        return link.channel.stream(sizes, receivers, [Group(0)] * self._comm.size, SLOTS)

    def __call__(self, blocks: Mapping[int, np.ndarray]) -> SubsetDecoder:
        """Exchange; returns what knows all blocks.

        Parameters
        ----------
        blocks : mapping from block to ndarray, shape (words,), uint32
            All blocks of this rank. The same bits on all ranks that compute a block.
        """
        decoder = SubsetDecoder(self._code, self._comm.rank, blocks)
        run(self._comm, (self._wire.comm,), self._steps(blocks, decoder), True, self)
        return decoder

    def _steps(self, blocks: Mapping[int, np.ndarray], decoder: SubsetDecoder) -> Steps:
        everyone, tag = range(self._comm.size), self._wire.tag()
        for which, senders in enumerate([[rank] for rank in everyone] if self._turns else [list(everyone)]):
            if self._link is not None:
                yield from self._by_multicast(self._link, which, senders, blocks, decoder)
            else:
                yield from self._by_messages(tag, senders, blocks, decoder)

    def _by_messages(self, tag: int, senders: list[int], blocks: Mapping[int, np.ndarray], decoder: SubsetDecoder) -> Steps:
        """Each packet to each of those it is for."""
        comm = self._wire.comm
        for sender in senders:
            for subset in self._code.subsets(sender):
                packet = np.empty(self._words, np.uint32)
                if sender == comm.rank:
                    self._code.encode(sender, subset, blocks, packet)
                    yield from [comm.Isend(packet, other, tag) for other in subset if other != sender]
                elif comm.rank in subset:
                    yield comm.Irecv(packet, sender, tag)
                    decoder.add(packet)

    def _by_multicast(self, link: Connection, which: int, senders: list[int], blocks: Mapping[int, np.ndarray],
                      decoder: SubsetDecoder) -> Steps:
        """One packet of each of the senders in each round."""
        rank, channel, stream = self._comm.rank, link.channel, self._streams[which]
        others = [sender for sender in senders if sender != rank]
        for subset in self._code.subsets(rank):
            round_ = self._rounds[which]
            self._rounds[which] += 1
            yield link.request(partial(stream.open_since, round_), "room for a packet")
            if rank in senders:
                with channel.lock:
                    packet = stream.view(round_, rank).view(np.uint32)
                    self._code.encode(rank, subset, blocks, packet)
                    channel.put(stream, round_, packet.nbytes)
                    channel.pump()
                self._comm.meter.sent(packet.nbytes)
            if others:
                yield link.request(partial(stream.complete_since, round_, others), "packets of other ranks")
            for sender in others:
                decoder.add(stream.view(round_, sender).view(np.uint32))
            with channel.lock:
                channel.release(stream, round_)
                channel.pump()
        if rank in senders:
            yield link.request(stream.idle_since, "other ranks to have a packet")

    def Free(self) -> None:
        """Collective: all ranks have what they need."""
        if self._link is not None:
            self._link.Free()
        self._wire.comm.Free()
