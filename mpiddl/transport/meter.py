"""The meter of a communicator: what a rank sends, and how long communication holds it up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

MOST_SPANS = 100_000
"""Kept by a meter."""

BYTES_BASIS = "own messages; library collectives by formula, allreduce 2(P-1)/P V, broadcast and all-gather (P-1)/P V a rank"


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
    there (waiting), and from then on (moving). What makes communicators, and `patient_barrier`, counts as waiting.
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

    def take(self, other: Meter) -> None:
        """Count what another meter has counted, and empty that one."""
        self.sent(other.bytes, other.messages)
        self.waiting, self.moving = self.waiting + other.waiting, self.moving + other.moving
        for span in other.spans:
            self.synchronised(*span)
        other.messages, other.bytes, other.waiting, other.moving, other.spans = 0, 0, 0.0, 0.0, []

    def sent(self, nbytes: int, messages: int = 1) -> None:
        self.bytes += int(nbytes)
        self.messages += messages


class Metered(Protocol):
    """What has a meter and a clock."""

    meter: Meter

    def now(self) -> float: ...


@contextmanager
def booked(comm: Metered, phase: str) -> Iterator[None]:
    """The seconds of a block are ``waiting`` or ``moving``, apart from those that calls inside book themselves."""
    meter, entered = comm.meter, comm.now()
    before, spans = meter.waiting + meter.moving, len(meter.spans)
    try:
        yield
    finally:
        inside = meter.waiting + meter.moving - before + sum(span.left - span.entered for span in meter.spans[spans:])
        setattr(meter, phase, getattr(meter, phase) + max(comm.now() - entered - inside, 0.0))


def allreduce_bytes(size: int, nbytes: int) -> int:
    """Bytes one rank sends in a bandwidth-optimal all-reduce of ``nbytes``: 2 (P-1)/P of them.

    The MPI library does not say which algorithm it runs; this is the least any algorithm sends
    (Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002, theorem 1).
    """
    return 2 * (size - 1) * nbytes // size


def bcast_bytes(size: int, nbytes: int) -> int:
    """Bytes one rank sends, on average, in a broadcast: (P-1)/P of the message, since P-1 ranks must receive it. The same for
    an all-gather whose result has ``nbytes``."""
    return (size - 1) * nbytes // size
