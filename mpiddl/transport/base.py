"""What a transport must offer, and what it may offer beyond that.

A transport moves messages between ranks: `Transport`, of which eight members have to be written. `mpiddl.transport.comm.Comm`
makes a communicator of any transport: it counts bytes and seconds, and handles failures. A transport may also have
capabilities, which are base classes: `Collectives` of its own library, `Processes`, and `mpiddl.transport.comm.NodeMemory`.
Where a transport has none of them, `Comm` does without: collectives are made of messages (`mpiddl.transport.messages`), and
each rank is a node of its own.

Transports: MPI (`mpiddl.transport.mpi`), virtual ranks in one process (`mpiddl.transport.virtual`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpiddl.machine import clock


class Op(Enum):
    """Reductions, named as in MPI."""

    SUM = "SUM"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"


class Special(Enum):
    """Arguments that stand for something else, named as in MPI."""

    IN_PLACE = "IN_PLACE"
    ANY_SOURCE = "ANY_SOURCE"
    ANY_TAG = "ANY_TAG"


SUM, MIN, MAX, PROD = Op
IN_PLACE, ANY_SOURCE, ANY_TAG = Special

COMBINE: dict[Op, np.ufunc] = {SUM: np.add, MIN: np.minimum, MAX: np.maximum, PROD: np.multiply}
"""numpy's loops run at the speed of memory and give up the interpreter lock. MIN and MAX hand on what is not a number."""

REDUCED = "bhilqBHILQfdgFDG"
"""Type characters of numpy for which MPI has a type with arithmetic: integers, floats and complex numbers."""

PATIENCE = 2000
"""Looks at a flag before the MPI library is given a chance to move messages: about a millisecond."""


class Envelope(NamedTuple):
    """Who sent a message, and under which tag."""

    source: int
    tag: int


class Request(Protocol):
    """A started operation. One that has a ``failure`` is lost; else it can be asked again, whatever it has raised."""

    def Wait(self) -> None: ...

    def Test(self) -> bool: ...


class Shared(Protocol):
    """Memory of one node: a segment of bytes for each rank, open to all of them.

    ``barrier`` is for kernels that meet the other ranks by themselves; () where ranks are no processes.
    """

    segments: list[np.ndarray]
    barrier: tuple[Any, ...]

    def meet(self) -> Request: ...

    def Free(self) -> None: ...


class Transport(ABC):
    """Messages between the ranks of one group. Messages of two ranks under one tag arrive in the order in which they were sent.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    simulated : bool
        The clock tells simulated time.
    error : type
        What an operation raises that is lost. After another exception, of a signal's handler, it can be asked again.
    """

    rank: int
    size: int
    simulated: bool = False
    error: type[Exception] = OSError

    @abstractmethod
    def isend(self, buf: np.ndarray, dest: int, tag: int) -> Request:
        """Start to send a contiguous array, which must not be changed before the request is complete."""

    @abstractmethod
    def irecv(self, buf: np.ndarray, source: Any, tag: Any) -> Request:
        """Start to receive a message of at most the size of ``buf``. ``source`` and ``tag`` may be ANY_SOURCE, ANY_TAG."""

    @abstractmethod
    def probe(self, source: Any, tag: Any) -> Envelope:
        """Wait for a message, without receiving it."""

    @abstractmethod
    def iprobe(self, source: Any, tag: Any) -> Envelope | None:
        """The envelope of a message that has come, if one has."""

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> Transport:
        """A transport of these ranks of ours, in this order, whose messages never meet those of another one.

        Collective over all ranks of this transport. Each names the ranks of its own group, itself among them.
        """

    @abstractmethod
    def free(self) -> None:
        """Give back what it has. Collective."""

    def send(self, buf: np.ndarray, dest: int, tag: int) -> None:
        self.isend(buf, dest, tag).Wait()

    def recv(self, buf: np.ndarray, source: Any, tag: Any) -> None:
        self.irecv(buf, source, tag).Wait()

    def now(self) -> float:
        """This rank's clock, in seconds."""
        return clock.now()

    def library(self) -> str:
        """Name and version of what moves the messages."""
        return type(self).__name__


class Collectives(ABC):
    """Collectives of a transport's own library."""

    @abstractmethod
    def allreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op) -> None: ...

    @abstractmethod
    def iallreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op) -> Request: ...

    @abstractmethod
    def bcast(self, buf: np.ndarray, root: int) -> None: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def ibarrier(self) -> Request: ...

    @abstractmethod
    def allgather(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order; their lengths may differ."""

    @abstractmethod
    def broadcast(self, mine: bytes, root: int) -> bytes:
        """The root's bytes."""


class Processes(ABC):
    """Ranks that are processes, whose library moves messages inside its calls only.

    Attributes
    ----------
    threads : bool
        Several threads of a process may call the library at a time.
    """

    threads: bool

    @abstractmethod
    def progress(self) -> None:
        """Let the library move messages: those started need not go on by themselves."""

    @abstractmethod
    def test_some(self, requests: Sequence[Any]) -> tuple[Sequence[int], Exception | None]:
        """Which of the requests are complete, by one call of the library; and the error with which they ended, if they did."""

    @abstractmethod
    def end_job(self, error: BaseException, where: str) -> None:
        """Print ``error``, which this rank alone has met, and end the job. Does not return."""
