"""W virtual ranks in one process, deterministic: the same program, strategy or whole training run, without MPI.

Each rank has a call stack of its own, but only the one that holds the baton runs (`mpiddl.transport.turns`); it hands the
baton on where it would block. So a program takes the same path every time, a receive nobody answers is found at once
(`CommError` naming what each rank waits for) instead of hanging, and W up to a few hundred needs no cluster.

Time is simulated: a rank's clock goes on by what `VirtualComm.compute` is told, and by what a message takes on the `Wire`;
the rank whose clock is behind goes first. So fast and slow ranks meet as they would, and always in the same way.

Cost: a message is one copy; with the switch from rank to rank that it brings, some 30 microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from mpiddl.errors import CommError, UsageError
from mpiddl.machine.clock import now
from mpiddl.memory import aligned_zeros
from mpiddl.transport.base import (
    ANY_SOURCE,
    ANY_TAG,
    COMBINE,
    IN_PLACE,
    Collectives,
    Envelope,
    Op,
    Transport,
)
from mpiddl.transport.comm import Comm, NodeMemory
from mpiddl.transport.in_flight import InFlight
from mpiddl.transport.meter import allreduce_bytes
from mpiddl.transport.turns import Turns

MOST_ASKED = 10_000  # far more turns than any rank computes between two messages while others wait


class Wire(NamedTuple):
    """What a message takes, in simulated time: ``latency`` seconds, and its bytes at ``rate`` bytes a second."""

    latency: float = 0.0
    rate: float = inf

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.rate


def run(size: int, program: Callable[[VirtualComm], Any], nodes: Sequence[int] | None = None,
        wire: Wire | None = None) -> list[Any]:
    """Run ``program(comm)`` on ``size`` virtual ranks; return what each returned, in rank order.

    ``nodes`` says on which virtual node each rank is, ``(0, 0, 1, 1)`` for two of two; by default all are on one. With
    a ``wire`` time is simulated; it says what messages between any two of them take.

    Raises
    ------
    CommError
        If all unfinished ranks wait for something that nobody will send.
    Exception
        The first exception a rank raises ends all of them and is raised here.

    Examples
    --------
    >>> import numpy as np
    >>> def program(comm):
    ...     total = np.array([float(comm.rank)])
    ...     comm.Allreduce(IN_PLACE, total)
    ...     return total.tolist()
    >>> run(4, program)
    [[6.0], [6.0], [6.0], [6.0]]
    """
    if size < 1:
        raise UsageError(f"size: got {size}, expected 1 rank or more")
    if nodes is not None and len(nodes) != size:
        raise UsageError(f"nodes: got {len(nodes)} numbers, expected one for each of {size} ranks")
    world = _World(size, list(nodes or [0] * size), simulated=wire is not None)

    def of_rank(rank: int) -> Any:
        return program(VirtualComm(VirtualTransport(world, rank, range(size), wire or Wire()), InFlight()))

    return world.run(of_rank)


@dataclass
class _Gathering:
    """One collective call on its way: what the ranks have brought, the outcome once all have, and since when it is there."""

    what: str
    brought: dict[int, Any] = field(default_factory=dict)
    outcome: Any = None
    since: float | None = None


class _Mail(NamedTuple):
    """A message in a box, and when it arrives."""

    source: int
    tag: int
    payload: np.ndarray
    arrival: float


class _World(Turns):
    """What the virtual ranks share: the baton, the mailboxes and the collectives on their way."""

    def __init__(self, size: int, nodes: list[int], simulated: bool):
        super().__init__(size)
        self.nodes, self.simulated = nodes, simulated
        self.mail: dict[tuple[Any, int], list[_Mail]] = {}
        self.gatherings: dict[tuple[Any, int], _Gathering] = {}
        self.events = 0  # messages and collective calls so far: while none comes, asking again is of no use


class VirtualComm(Comm):
    """The communicator of one virtual rank; made by `run`."""

    transport: VirtualTransport

    @property
    def wire(self) -> Wire:
        """What its messages take; that of the one it was made from, unless told otherwise."""
        return self.transport.wire

    @wire.setter
    def wire(self, wire: Wire) -> None:
        self.transport.wire = wire

    @property
    def clock(self) -> float:
        """Seconds of this rank's simulated clock."""
        return self.transport.clock

    def compute(self, seconds: float) -> None:
        """Let so much time pass on this rank's clock, while the others go on."""
        self.transport.compute(seconds)


class VirtualTransport(Transport, Collectives, NodeMemory):
    """Messages and collectives of one virtual rank."""

    error = CommError

    def __init__(self, world: _World, rank: int, members: Sequence[int], wire: Wire, context: tuple[Any, ...] = ()):
        self.rank, self.size, self.wire = rank, len(members), wire
        self.world, self._members, self._context = world, members, context
        self.simulated = world.simulated
        self._calls = 0  # collectives so far: the n-th call of every rank belongs together
        self._groups = 0

    @property
    def clock(self) -> float:
        """Seconds of this rank's simulated clock."""
        return self.world.clocks[self._members[self.rank]]

    def now(self) -> float:
        """Seconds of this rank's simulated clock, or of the real one."""
        return self.clock if self.world.simulated else now()

    def library(self) -> str:
        return "virtual ranks in one process" + ", in simulated time" * self.world.simulated

    def compute(self, seconds: float) -> None:
        """Let so much time pass on this rank's clock, while the others go on."""
        self.world.pass_time(self._members[self.rank], seconds)

    def send(self, buf: np.ndarray, dest: int, tag: int) -> None:
        self._check_rank("dest", dest)
        box = self.world.mail.setdefault((self._context, dest), [])
        before = max((mail.arrival for mail in box if mail.source == self.rank), default=0.0)
        box.append(_Mail(self.rank, tag, np.array(buf), max(self.clock + self.wire.seconds(buf.nbytes), before)))
        self.world.events += 1

    def isend(self, buf: np.ndarray, dest: int, tag: int) -> VirtualRequest:
        self.send(buf, dest, tag)
        return VirtualRequest(self, lambda: 0.0, "nothing")

    def irecv(self, buf: np.ndarray, source: Any, tag: Any) -> VirtualRequest:
        what = f"a message from {source} under tag {tag}"
        return VirtualRequest(self, lambda: self._arrival(source, tag), what, lambda: self._take(buf, source, tag))

    def probe(self, source: Any, tag: Any) -> Envelope:
        self.block(lambda: self._arrival(source, tag), f"any message from {source} under tag {tag}")
        mail = self._find(source, tag)
        assert mail is not None  # block() returned
        return Envelope(mail.source, mail.tag)

    def iprobe(self, source: Any, tag: Any) -> Envelope | None:
        """A message that has come by now; the other ranks have their turns first."""
        self.compute(0.0)
        mail = self._find(source, tag)
        return Envelope(mail.source, mail.tag) if mail is not None and mail.arrival <= self.clock else None

    def group(self, ranks: Sequence[int]) -> VirtualTransport:
        self._groups += 1
        members = [self._members[rank] for rank in ranks]
        context = *self._context, self._groups, ranks[0]
        return VirtualTransport(self.world, ranks.index(self.rank), members, self.wire, context)

    def free(self) -> None:
        """Nothing to free: the world goes when its last rank returns."""

    def allreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op) -> None:
        self.iallreduce(sendbuf, recvbuf, op).Wait()

    def iallreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op) -> VirtualRequest:
        mine = np.array(recvbuf if sendbuf is IN_PLACE else sendbuf)
        nbytes = allreduce_bytes(self.size, mine.nbytes)
        gathering = self._bring(mine, lambda parts: _reduce(parts, op), f"an all-reduce ({op.name})", nbytes)

        def deliver() -> None:
            recvbuf[...] = gathering.outcome.reshape(recvbuf.shape)

        return VirtualRequest(self, lambda: gathering.since, "an all-reduce", deliver)

    def bcast(self, buf: np.ndarray, root: int) -> None:
        self._check_rank("root", root)
        buf[...] = self._gathered(np.array(buf), lambda parts: parts[root], f"a broadcast from {root}", buf.nbytes)

    def barrier(self) -> None:
        self._gathered(None, lambda parts: None, "a barrier")

    def ibarrier(self) -> VirtualRequest:
        gathering = self._bring(None, lambda parts: None, "a meeting")
        return VirtualRequest(self, lambda: gathering.since, "a meeting")

    def allgather(self, mine: bytes) -> list[bytes]:
        return self._everyone(mine, "allgather")

    def broadcast(self, mine: bytes, root: int) -> bytes:
        self._check_rank("root", root)
        return self._everyone(mine, f"a broadcast from {root}")[root]

    def nodes(self) -> list[int]:
        theirs = [self.world.nodes[member] for member in self._members]
        return [theirs.index(node) for node in theirs]

    def share(self, comm: Comm, nbytes: int) -> VirtualShared:
        return VirtualShared(self, nbytes)

    def block(self, since: Callable[[], float | None], what: str, asks: bool = False) -> None:
        """Let other ranks run until ``since()`` is a moment, or if it only ``asks`` for a turn (`Turns.wait`)."""
        self.world.wait(self._members[self.rank], since, what, asks)

    def exchanged(self, mine: np.ndarray) -> list[np.ndarray]:
        """Every rank's array itself, no copy of it."""
        return self._everyone(mine, "an exchange of memory")

    def _everyone(self, mine: Any, what: str) -> list[Any]:
        parts = self._gathered(mine, dict, what)
        return [parts[rank] for rank in range(self.size)]

    def _inbox(self) -> list[_Mail]:
        return self.world.mail.setdefault((self._context, self.rank), [])

    def _find(self, source: Any, tag: Any) -> _Mail | None:
        """What arrives first."""
        fits = [mail for mail in self._inbox() if source in (ANY_SOURCE, mail.source) and tag in (ANY_TAG, mail.tag)]
        return min(fits, key=attrgetter("arrival"), default=None)

    def _arrival(self, source: Any, tag: Any) -> float | None:
        mail = self._find(source, tag)
        return mail.arrival if mail is not None else None

    def _take(self, buf: np.ndarray, source: Any, tag: Any) -> None:
        mail = self._find(source, tag)
        assert mail is not None  # the request was ready
        box = self._inbox()
        del box[next(place for place, other in enumerate(box) if other is mail)]
        payload = mail.payload
        if payload.size > buf.size or payload.dtype != buf.dtype:
            raise CommError(f"message: got {payload.size} numbers of {payload.dtype}, expected at most {buf.size} of "
                            f"{buf.dtype}")
        buf.reshape(-1)[: payload.size] = payload.reshape(-1)

    def _check_rank(self, argument: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise CommError(f"{argument}: got {rank}, expected a rank from 0 to {self.size - 1}")

    def _bring(self, mine: Any, combine: Callable[[dict[int, Any]], Any], what: str, nbytes: int = 0) -> _Gathering:
        """Add this rank's part to its next collective; the last rank to come combines the parts in rank order.

        It is over when the last has come and ``nbytes`` have crossed the wire.
        """
        key = (self._context, self._calls)
        self._calls += 1
        gathering = self.world.gatherings.setdefault(key, _Gathering(what))
        if gathering.what != what:
            raise CommError(f"collective calls do not match: rank {self.rank} calls {what}, other ranks call {gathering.what}")
        self.world.events += 1
        gathering.brought[self.rank] = mine
        if len(gathering.brought) == self.size:
            gathering.outcome = combine(gathering.brought)
            gathering.since = self.clock + self.wire.seconds(nbytes)
            del self.world.gatherings[key]
        return gathering

    def _gathered(self, mine: Any, combine: Callable[[dict[int, Any]], Any], what: str, nbytes: int = 0) -> Any:
        """A collective call that waits."""
        gathering = self._bring(mine, combine, what, nbytes)
        self.block(lambda: gathering.since, what)
        return gathering.outcome


class VirtualShared:
    """Memory of one virtual node: virtual ranks see each other's arrays as they are."""

    def __init__(self, transport: VirtualTransport, nbytes: int):
        self._transport = transport.group(range(transport.size))
        self.segments = self._transport.exchanged(aligned_zeros(nbytes, np.uint8))
        self.barrier = ()

    def meet(self) -> VirtualRequest:
        return self._transport.ibarrier()

    def Free(self) -> None:
        self.segments = []


class VirtualRequest:
    """A started operation of a virtual rank; ``since()`` is the moment from which it is complete, None if nobody knows yet."""

    def __init__(self, transport: VirtualTransport, since: Callable[[], float | None], what: str,
                 deliver: Callable[[], None] | None = None):
        self._transport, self._since, self._what, self._deliver = transport, since, what, deliver
        self._done, self._asked, self._events = False, 0, 0

    def Wait(self) -> None:
        if not self._done:
            self._transport.block(self._since, self._what)
            self._finish()

    def Test(self) -> bool:
        if not self._done:
            self._transport.block(self._since, "its next turn", asks=True)
            since = self._since()
            if since is not None and since <= self._transport.clock:
                self._finish()
            else:
                self._be_patient()
        return self._done

    def _be_patient(self) -> None:
        """A rank that asks and asks while nothing happens anywhere is deadlocked, too."""
        events = self._transport.world.events
        self._asked = self._asked + 1 if events == self._events else 0
        self._events = events
        if self._asked > MOST_ASKED:
            raise CommError(f"virtual ranks are deadlocked: rank {self._transport.rank} waits for {self._what}, which no rank "
                            "sends")

    def _finish(self) -> None:
        if self._deliver is not None:
            self._deliver()
        self._done = True


def _reduce(parts: dict[int, np.ndarray], op: Op) -> np.ndarray:
    """Left fold in rank order: the same bits whatever the order of arrival."""
    total = parts[0].copy()
    for rank in range(1, len(parts)):
        if parts[rank].shape != total.shape or parts[rank].dtype != total.dtype:
            raise CommError(
                f"all-reduce: rank {rank} passed shape {parts[rank].shape} of {parts[rank].dtype}, "
                f"rank 0 passed shape {total.shape} of {total.dtype}; expected the same shape and dtype"
            )
        COMBINE[op](total, parts[rank], out=total)
    return total
