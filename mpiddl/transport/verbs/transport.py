"""Verbs as a transport: messages go over queue pairs; collectives of the library are those of MPI."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddl.errors import TransportError
from mpiddl.transport.agree import agreed
from mpiddl.transport.base import ANY_SOURCE, Collectives, Envelope, Op, Request, Transport
from mpiddl.transport.comm import Comm
from mpiddl.transport.verbs.device import DEPTH, VerbsDevice
from mpiddl.transport.verbs.messages import EAGER_BYTES, Messages

DEVICE = "MPIDDL_VERBS"
"""The environment variable that names the device, as `mpiddl.transport.verbs.ports.parse` takes it; "off" for none."""

ENTRIES, LEAST_DEPTH = 4096, 4
"""Of the queues of a rank to all others; and of one queue."""


class VerbsTransport(Transport, Collectives):
    """The ranks of an MPI communicator, whose messages go over verbs.

    Parameters
    ----------
    comm : Comm
        Of these ranks.
    messages : Messages
        Of a device that connects the ranks; several transports may share it.
    group : int
        Tells the messages of this transport from those of others.
    ranks : sequence of int
        The number of each rank on the device.
    owns : bool
        ``comm`` is freed with it.
    """

    error = TransportError

    def __init__(self, comm: Comm, messages: Messages, group: int, ranks: Sequence[int], owns: bool = False):
        if not isinstance(comm.transport, Collectives):
            raise TransportError(f"verbs: got {comm.library()}, expected MPI ranks")
        self.rank, self.size, self.messages = comm.rank, comm.size, messages
        self._comm, self._group, self._ranks, self._library, self._owns = comm, group, list(ranks), comm.transport, owns

    def isend(self, buf: np.ndarray, dest: int, tag: int) -> Request:
        return self.messages.send(buf, self._ranks[dest], self._group, tag)

    def irecv(self, buf: np.ndarray, source: Any, tag: Any) -> Request:
        return self.messages.receive(buf, self._peer(source), self._group, tag)

    def probe(self, source: Any, tag: Any) -> Envelope:
        while (found := self.iprobe(source, tag)) is None:
            os.sched_yield()
        return found

    def iprobe(self, source: Any, tag: Any) -> Envelope | None:
        found = self.messages.probe(self._peer(source), self._group, tag)
        return None if found is None else found._replace(source=self._ranks.index(found.source))

    def group(self, ranks: Sequence[int]) -> VerbsTransport:
        made = self._comm.Create(ranks)
        number = max(made.setup_allgather(self.messages.groups)) + 1  # which no rank of it has used
        self.messages.groups = number
        return VerbsTransport(made, self.messages, number, [self._ranks[rank] for rank in ranks], owns=True)

    def free(self) -> None:
        """Collective. The device is its owner's."""
        if self._owns and not self._comm.freed:
            self._comm.Free()

    def library(self) -> str:
        return "verbs"

    def _peer(self, source: Any) -> Any:
        return source if source is ANY_SOURCE else self._ranks[source]

    def allreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op) -> None:
        self._library.allreduce(sendbuf, recvbuf, op)

    def iallreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op) -> Request:
        return self._library.iallreduce(sendbuf, recvbuf, op)

    def bcast(self, buf: np.ndarray, root: int) -> None:
        self._library.bcast(buf, root)

    def barrier(self) -> None:
        self._library.barrier()

    def ibarrier(self) -> Request:
        return self._library.ibarrier()

    def allgather(self, mine: bytes) -> list[bytes]:
        return self._library.allgather(mine)

    def broadcast(self, mine: bytes, root: int) -> bytes:
        return self._library.broadcast(mine, root)


class VerbsComm(Comm):
    """A communicator whose messages go over verbs; made by `connect`."""

    transport: VerbsTransport
    owns: bool = False
    """It closes the device when it is freed."""

    @property
    def messages(self) -> Messages:
        return self.transport.messages

    def Free(self) -> None:
        """Collective: no rank gives up its queue pairs while another one uses them."""
        if not self.freed:
            messages = self.messages
            messages.operations.drain()
            self.Barrier()
            super().Free()
            if self.owns:
                messages.close()


def usual_depth(size: int) -> int:
    """Entries of each queue between so many ranks: so few that their buffers take less than 70 MB up to 1024 ranks."""
    return min(DEPTH, max(LEAST_DEPTH, ENTRIES // size))


def connect(comm: Comm, device: str = "", depth: int = 0, eager_bytes: int = EAGER_BYTES, writes: bool = False) -> VerbsComm:
    """The same ranks as ``comm``, whose messages go over verbs.

    Parameters
    ----------
    comm : Comm
        MPI ranks. It must not be freed before.
    device : str
        DEVICE[:PORT[:GID-INDEX]]; by default the first port that is up.
    depth : int
        Entries of each queue; 0: as `usual_depth`.
    eager_bytes, writes :
        See `Messages`.

    Raises
    ------
    TransportError
        On all ranks, with the reason: verbs do not work here.

    Communication
    -------------
    Collective.
    """
    if not comm.processes:
        raise TransportError(f"verbs: got {comm.library()}, expected MPI ranks")
    depth = depth or usual_depth(comm.size)
    opened = VerbsDevice(comm, device, depth)
    try:
        with agreed(comm):  # no rank sends before all have posted their receives
            messages = Messages(opened, eager_bytes, writes)
    except BaseException:
        opened.close()
        raise
    made = VerbsComm(VerbsTransport(comm, messages, 0, range(comm.size)), comm.started, ends_jobs=False)
    made.owns = True
    return made
