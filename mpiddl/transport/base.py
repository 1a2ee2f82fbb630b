"""What every transport offers, and the meter that counts what a rank sends and how long it is held up.

The interface is mpi4py's own, cut down to what strategies use: upper case moves numpy buffers, lower case moves pickled
objects, arguments come as ``(sendbuf, recvbuf, op)``. A strategy written against it runs on real MPI
(`mpiddl.transport.mpi`) and on virtual ranks in one process (`mpiddl.transport.virtual`) without a change.
The one departure: `Probe` returns the envelope instead of filling in a status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np


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

REDUCED = "bhilqBHILQfdgFDG"
"""Type characters of numpy for which MPI has a type with arithmetic: integers, floats and complex numbers."""

PATIENCE = 2000
"""Looks at a flag before the MPI library is given a chance to move messages: about a millisecond."""


MOST_SPANS = 100_000
"""Kept by a meter."""


class Envelope(NamedTuple):
    """Who sent a message, and under which tag."""

    source: int
    tag: int


class Span(NamedTuple):
    """One synchronising call, in seconds of this rank's clock: when the rank was there with its data, when it began to
    wait for the result, when it had it."""

    arrived: float
    entered: float
    left: float


@dataclass
class Meter:
    """What this rank sent (payload bytes, messages) and the seconds it spent in communication.

    Collectives leave a `Span` each: which part of it was waiting for the last rank is known only after the ranks have
    compared their arrivals (`mpiddl.training.metrics`). Point-to-point calls split their seconds at once: until the message was
    there (waiting), and from then on (moving). What makes communicators, and `patient_barrier`, counts as waiting. Lower-case
    calls count as seconds, not as bytes.
    """

    messages: int = 0
    bytes: int = 0
    waiting: float = 0.0
    moving: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def synchronised(self, arrived: float, entered: float, left: float) -> None:
        """Note a collective's `Span`; where nobody takes them away, the oldest are forgotten."""
        if len(self.spans) >= MOST_SPANS:
            del self.spans[: MOST_SPANS // 2]
        self.spans.append(Span(arrived, entered, left))

    @property
    def seconds(self) -> float:
        """Spent in communication, waiting included, as far as spans are kept."""
        return self.waiting + self.moving + sum(span.left - span.entered for span in self.spans)

    def sent(self, nbytes: int, messages: int = 1) -> None:
        self.bytes += int(nbytes)
        self.messages += messages


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


class Comm(Protocol):
    """The communicator that strategies talk through.

    Beyond mpi4py's: ``nodes`` says on which node each rank is, ``share`` gives the ranks of one node memory in common,
    ``kept`` makes, collectively, what lives as long as the communicator, ``progress`` lets the library move messages,
    ``test_some`` asks the library for several requests at once,
    ``started`` is what this rank has under way, on whatever communicator: who waits for one thing must move the others on.
    ``now`` is this rank's clock, in seconds; ``simulated``, whether it only tells what it is told. ``processes``: each rank is
    one, and not all of them threads that take turns.
    ``broken``: an exception ended a collective in the middle; ``held`` is one that came before the steps of a collective, which
    raises it when it is over. Who has called ``kept`` and begins none calls `raise_held`.
    """

    rank: int
    size: int
    meter: Meter
    freed: bool
    broken: bool
    held: BaseException | None
    simulated: bool
    processes: bool
    started: list[Any]

    def now(self) -> float: ...

    def Allreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op = SUM) -> None: ...

    def Iallreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op = SUM) -> Request: ...

    def Bcast(self, buf: np.ndarray, root: int = 0) -> None: ...

    def Barrier(self) -> None: ...

    def Send(self, buf: np.ndarray, dest: int, tag: int = 0) -> None: ...

    def Recv(self, buf: np.ndarray, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> None: ...

    def Isend(self, buf: np.ndarray, dest: int, tag: int = 0) -> Request: ...

    def Irecv(self, buf: np.ndarray, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> Request: ...

    def Sendrecv(
        self, sendbuf: np.ndarray, dest: int, sendtag: int, recvbuf: np.ndarray, source: int, recvtag: int
    ) -> None: ...

    def Probe(self, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> Envelope: ...

    def Iprobe(self, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> Envelope | None: ...

    def allgather(self, obj: Any) -> list[Any]: ...

    def bcast(self, obj: Any, root: int = 0) -> Any: ...

    def nodes(self) -> list[int]: ...

    def share(self, nbytes: int) -> Shared: ...

    def kept(self, key: Any, make: Callable[[], Any]) -> Any: ...

    def progress(self) -> None: ...

    def test_some(self, requests: Sequence[Any]) -> list[bool]: ...

    def patient_barrier(self, pause_s: float = 0.002) -> None: ...

    def check_threads(self) -> None: ...

    def Split(self, color: int, key: int = 0) -> Comm: ...

    def Dup(self) -> Comm: ...

    def Free(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...


@contextmanager
def booked(comm: Any, phase: str) -> Iterator[None]:
    """The seconds of a block are ``waiting`` or ``moving``, apart from those that calls inside book themselves."""
    meter, entered = comm.meter, comm.now()
    before, spans = meter.waiting + meter.moving, len(meter.spans)
    try:
        yield
    finally:
        inside = meter.waiting + meter.moving - before + sum(span.left - span.entered for span in meter.spans[spans:])
        setattr(meter, phase, getattr(meter, phase) + max(comm.now() - entered - inside, 0.0))


def raise_held(comm: Any) -> None:
    """Raise what ``comm`` has held back, once; nobody waits for this rank now."""
    error, comm.held = comm.held, None
    if error is not None:
        raise error


BYTES_BASIS = ("own messages; library collectives by formula, allreduce 2(P-1)/P V, broadcast (P-1)/P V a rank; pickled "
               "objects are not counted")


def allreduce_bytes(size: int, nbytes: int) -> int:
    """Bytes one rank sends in a bandwidth-optimal all-reduce of ``nbytes``: 2 (P-1)/P of them.

    The MPI library does not say which algorithm it runs; this is the least any algorithm sends
    (Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002, theorem 1).
    """
    return 2 * (size - 1) * nbytes // size


def bcast_bytes(size: int, nbytes: int) -> int:
    """Bytes one rank sends, on average, in a broadcast: (P-1)/P of the message, since P-1 ranks must receive it."""
    return (size - 1) * nbytes // size
