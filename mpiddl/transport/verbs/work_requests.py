"""What a device with queue pairs to all peers offers: the interface that real verbs and a fake have in common.

A work request is put into the send queue of a peer. Requests of one queue complete in order. So the completion of a signalled
request tells that all earlier ones of the same queue are complete, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from mpiddl.errors import TransportError


class Kind(Enum):
    """Of a work request. The text is for messages."""

    SEND = "send"
    WRITE = "write"
    WRITE_IMM = "write with immediate"
    READ = "read"
    FETCH_ADD = "fetch-and-add"
    COMPARE_SWAP = "compare-and-swap"


class Memory(NamedTuple):
    """Registered memory: of this rank with its local key, or of a peer with its remote key."""

    address: int
    nbytes: int
    key: int

    def part(self, begin: int, nbytes: int) -> Memory:
        return Memory(self.address + begin, nbytes, self.key)


class WorkRequest(NamedTuple):
    """An entry of the send queue.

    number : counts the requests of this peer.
    local : what is sent, or where a read or an atomic operation puts what it finds.
    remote : of a one-sided operation.
    immediate : 32 bits that the peer gets with a write; it takes one of its receives.
    values : what is added; or what is expected and what replaces it.
    inline : the bytes are copied at once, and ``local`` need not be registered.
    signalled : its completion is reported.
    """

    number: int
    kind: Kind
    local: Memory
    remote: Memory | None = None
    immediate: int = 0
    values: tuple[int, int] = (0, 0)
    inline: bool = False
    signalled: bool = True


class Completion(NamedTuple):
    """What has ended.

    peer : of which queue pair.
    number : of the work request, or of the receive.
    received : it is a receive: a send has come, or a write with ``immediate``.
    trouble : name of the status, such as IBV_WC_RETRY_EXC_ERR; "" if all went well.
    nbytes : of a message that was received.
    """

    peer: int
    number: int
    received: bool
    trouble: str = ""
    nbytes: int = 0
    immediate: int | None = None


class Registered(NamedTuple):
    """A registered array: its keys, for this rank and for peers."""

    address: int
    nbytes: int
    local_key: int
    remote_key: int

    @property
    def local(self) -> Memory:
        return Memory(self.address, self.nbytes, self.local_key)

    @property
    def remote(self) -> Memory:
        return Memory(self.address, self.nbytes, self.remote_key)


class Device(ABC):
    """Queue pairs to all peers.

    Attributes
    ----------
    rank, size : int
        There is a queue pair to each rank, also to this one: its own memory may be changed by the device only, where others
        change it with atomic operations.
    inline : int
        Most bytes that a work request carries itself.
    sends, receives : int
        Entries of each queue.
    largest : int
        Most bytes of a work request.
    port : object
        Its ``str`` names the device and the port.
    forked : bool
        This process is a copy of the one that opened it.
    closed : bool
    """

    rank: int
    size: int
    inline: int
    sends: int
    receives: int
    largest: int
    port: object
    forked: bool = False
    closed: bool = False

    def check_process(self) -> None:
        """Raise a `TransportError` in a forked process, and when the device is closed: to touch it would end the process."""
        if self.closed:
            raise TransportError("verbs: the connections were closed by Free(), expected messages and requests before that")
        if self.forked:
            raise TransportError("verbs: this process was forked from one that uses verbs, expected the process that opened "
                                 "the device")

    @abstractmethod
    def register(self, array: np.ndarray) -> Registered:
        """Make an array known to the device. A `TransportError` where the system does not allow it."""

    @abstractmethod
    def unregister(self, registered: Registered) -> None: ...

    @abstractmethod
    def post(self, peer: int, request: WorkRequest) -> None:
        """Put it into the send queue, which must have room."""

    @abstractmethod
    def release(self, prepared: Any) -> None:
        """Give back what `prepare` has made."""

    def prepare(self, peer: int, request: WorkRequest) -> Any:
        """An inline request that is posted again and again; its bytes are those of each time."""
        return request

    def post_again(self, peer: int, prepared: Any, number: int, signalled: bool) -> None:
        """Post what `prepare` has made."""
        self.post(peer, prepared._replace(number=number, signalled=signalled))

    @abstractmethod
    def post_receive(self, peer: int, number: int, memory: Memory) -> None: ...

    @abstractmethod
    def poll(self) -> list[Completion]:
        """What has ended since the last call."""

    @abstractmethod
    def close(self) -> None: ...
