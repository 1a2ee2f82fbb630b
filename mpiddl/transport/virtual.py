"""W virtual ranks in one process, deterministic: the same program, strategy or whole training run, without MPI.

Each rank has a call stack of its own, but only the one that holds the baton runs (`mpiddl.transport.turns`); it hands the
baton on where it would block. So a program takes the same path every time, a receive nobody answers is found at once
(`CommError` naming what each rank waits for) instead of hanging, and W up to a few hundred needs no cluster.

Time is simulated: a rank's clock goes on by what `VirtualComm.compute` is told, and by what a message takes on the `Wire`;
the rank whose clock is behind goes first. So fast and slow ranks meet as they would, and always in the same way.

Cost: a message is one copy; with the switch from rank to rank that it brings, some 30 microseconds.
"""

from __future__ import annotations

import pickle
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
    IN_PLACE,
    SUM,
    Envelope,
    Meter,
    Op,
    allreduce_bytes,
    bcast_bytes,
    booked,
)
from mpiddl.transport.turns import Turns

MOST_ASKED = 10_000  # far more turns than any rank computes between two messages while others wait
_REDUCE = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum, "PROD": np.multiply}


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
    return world.run(lambda rank: program(VirtualComm(world, rank, range(size), wire or Wire())))


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
        self.started: list[list[Any]] = [[] for _ in range(size)]
        self.events = 0  # messages and collective calls so far: while none comes, asking again is of no use


class VirtualComm:
    """The communicator of one virtual rank; made by `run`, duplicated by `Dup`, cut by `Split`.

    wire : what its messages take; that of the one it was made from, unless told otherwise.
    """

    def __init__(self, world: _World, rank: int, members: Sequence[int], wire: Wire, context: tuple[Any, ...] = ()):
        self.rank, self.size, self.wire = rank, len(members), wire
        self.meter = Meter()
        self.freed = self.broken = self.processes = False
        self.held: BaseException | None = None
        self.started = world.started[members[rank]]
        self._world, self._members, self._context = world, members, context
        self._calls = 0  # collectives so far: the n-th call of every rank belongs together
        self._children = 0
        self._kept: dict[Any, Any] = {}

    @property
    def simulated(self) -> bool:
        """Whether time is."""
        return self._world.simulated

    @property
    def clock(self) -> float:
        """Seconds of this rank's simulated clock."""
        return self._world.clocks[self._members[self.rank]]

    def now(self) -> float:
        """Seconds of this rank's simulated clock, or of the real one."""
        return self.clock if self.simulated else now()

    def compute(self, seconds: float) -> None:
        """Let so much time pass on this rank's clock, while the others go on."""
        self._world.pass_time(self._members[self.rank], seconds)

    def Allreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op = SUM) -> None:
        self.Iallreduce(sendbuf, recvbuf, op).Wait()

    def Iallreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op = SUM) -> VirtualRequest:
        mine = np.array(recvbuf if sendbuf is IN_PLACE else sendbuf)
        nbytes = allreduce_bytes(self.size, mine.nbytes)
        self.meter.sent(nbytes)
        gathering = self._bring(mine, lambda parts: _reduce(parts, op), f"an all-reduce ({op.name})", nbytes)

        def deliver() -> None:
            recvbuf[...] = gathering.outcome.reshape(recvbuf.shape)

        return VirtualRequest(self, lambda: gathering.since, "an all-reduce", deliver, collective=True)

    def Bcast(self, buf: np.ndarray, root: int = 0) -> None:
        self._check_rank("root", root)
        self.meter.sent(bcast_bytes(self.size, buf.nbytes))
        buf[...] = self._together(np.array(buf), lambda parts: parts[root], f"a broadcast from {root}", buf.nbytes)

    def Barrier(self) -> None:
        self._together(None, lambda parts: None, "a barrier")

    def patient_barrier(self, pause_s: float = 0.002) -> None:
        request = self.meet()
        with booked(self, "waiting"):
            while not request.Test():
                for started in list(self.started):
                    started.move_on()

    def allgather(self, obj: Any) -> list[Any]:
        parts = self._together(pickle.dumps(obj), lambda parts: [parts[rank] for rank in range(self.size)], "allgather")
        return [pickle.loads(part) for part in parts]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return self.allgather(obj if self.rank == root else None)[root]

    def Send(self, buf: np.ndarray, dest: int, tag: int = 0) -> None:
        self._check_rank("dest", dest)
        box = self._world.mail.setdefault((self._context, dest), [])
        before = max((mail.arrival for mail in box if mail.source == self.rank), default=0.0)
        box.append(_Mail(self.rank, tag, np.array(buf), max(self.clock + self.wire.seconds(buf.nbytes), before)))
        self._world.events += 1
        self.meter.sent(buf.nbytes)

    def Isend(self, buf: np.ndarray, dest: int, tag: int = 0) -> VirtualRequest:
        self.Send(buf, dest, tag)
        return VirtualRequest(self, lambda: 0.0, "nothing")

    def Irecv(self, buf: np.ndarray, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> VirtualRequest:
        what = f"a message from {source} under tag {tag}"
        return VirtualRequest(self, lambda: self._arrival(source, tag), what, lambda: self._take(buf, source, tag))

    def Recv(self, buf: np.ndarray, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> None:
        self.Irecv(buf, source, tag).Wait()

    def Sendrecv(
        self, sendbuf: np.ndarray, dest: int, sendtag: int, recvbuf: np.ndarray, source: int, recvtag: int
    ) -> None:
        self.Send(sendbuf, dest, sendtag)
        self.Recv(recvbuf, source, recvtag)

    def Probe(self, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> Envelope:
        with booked(self, "waiting"):
            self.block(lambda: self._arrival(source, tag), f"any message from {source} under tag {tag}")
        mail = self._find(source, tag)
        assert mail is not None  # block() returned
        return Envelope(mail.source, mail.tag)

    def Iprobe(self, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> Envelope | None:
        """The envelope of a message that has come by now, if one has; the others have their turns first."""
        self.compute(0.0)
        mail = self._find(source, tag)
        return Envelope(mail.source, mail.tag) if mail is not None and mail.arrival <= self.clock else None

    def Dup(self) -> VirtualComm:
        self._children += 1
        return VirtualComm(self._world, self.rank, self._members, self.wire, (*self._context, self._children))

    def Split(self, color: int, key: int = 0) -> VirtualComm:
        self._children += 1
        with booked(self, "waiting"):
            parts = self._gathered((color, key), dict, "a split")
        order = sorted((its_key, rank) for rank, (its_color, its_key) in parts.items() if its_color == color)
        ranks = [rank for _, rank in order]
        members = [self._members[rank] for rank in ranks]
        return VirtualComm(self._world, ranks.index(self.rank), members, self.wire, (*self._context, self._children, color))

    def local_ranks(self) -> VirtualComm:
        return self.Split(self.nodes()[self.rank])

    def nodes(self) -> list[int]:
        theirs = [self._world.nodes[member] for member in self._members]
        return [theirs.index(node) for node in theirs]

    def share(self, nbytes: int) -> VirtualShared:
        return VirtualShared(self, nbytes)

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._kept or getattr(self._kept[key], "freed", False):
            with booked(self, "waiting"):  # simulated time passes in its messages only
                self._kept[key] = make()
        return self._kept[key]

    def progress(self) -> None:
        """Messages of virtual ranks are there as soon as they are sent."""

    def library(self) -> str:
        return "virtual ranks in one process" + ", in simulated time" * self.simulated

    def Free(self) -> None:
        """Nothing to free: the world goes when its last rank returns."""
        self.freed = True
        self._kept.clear()

    def fail(self, error: BaseException) -> None:
        """Nothing to agree on: `run` ends all ranks with the first failure."""

    def test_some(self, requests: Sequence[Any]) -> list[bool]:
        """There is no library to be asked: any of them may be complete."""
        return [True] * len(requests)

    def check_threads(self) -> None:
        raise CommError("threads: got virtual ranks, expected MPI ranks, which a progress thread needs")

    @property
    def events(self) -> int:
        """Messages and collective calls of all ranks so far."""
        return self._world.events

    def block(self, since: Callable[[], float | None], what: str, asks: bool = False) -> None:
        """Let other ranks run until ``since()`` is a moment, or if it only ``asks`` for a turn (`Turns.wait`)."""
        self._world.wait(self._members[self.rank], since, what, asks)

    def meet(self) -> VirtualRequest:
        """A barrier that need not be waited for."""
        gathering = self._bring(None, lambda parts: None, "a meeting")
        return VirtualRequest(self, lambda: gathering.since, "a meeting")

    def exchanged(self, mine: np.ndarray) -> list[np.ndarray]:
        """Every rank's array itself, no copy of it."""
        parts = self._gathered(mine, dict, "an exchange of memory")
        return [parts[rank] for rank in range(self.size)]

    def _inbox(self) -> list[_Mail]:
        return self._world.mail.setdefault((self._context, self.rank), [])

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
        gathering = self._world.gatherings.setdefault(key, _Gathering(what))
        if gathering.what != what:
            raise CommError(f"collective calls do not match: rank {self.rank} calls {what}, other ranks call {gathering.what}")
        self._world.events += 1
        gathering.brought[self.rank] = mine
        if len(gathering.brought) == self.size:
            gathering.outcome = combine(gathering.brought)
            gathering.since = self.clock + self.wire.seconds(nbytes)
            del self._world.gatherings[key]
        return gathering

    def _together(self, mine: Any, combine: Callable[[dict[int, Any]], Any], what: str, nbytes: int = 0) -> Any:
        """A collective call that waits."""
        entered = self.now()
        outcome = self._gathered(mine, combine, what, nbytes)
        self.meter.synchronised(entered, entered, self.now())
        return outcome

    def _gathered(self, mine: Any, combine: Callable[[dict[int, Any]], Any], what: str, nbytes: int = 0) -> Any:
        """The same; its seconds are the caller's."""
        gathering = self._bring(mine, combine, what, nbytes)
        self.block(lambda: gathering.since, what)
        return gathering.outcome


class VirtualShared:
    """Memory of one virtual node: virtual ranks see each other's arrays as they are."""

    def __init__(self, comm: VirtualComm, nbytes: int):
        self._comm = comm.Dup()
        self.segments = self._comm.exchanged(aligned_zeros(nbytes, np.uint8))
        self.barrier = ()

    def meet(self) -> VirtualRequest:
        return self._comm.meet()

    def Free(self) -> None:
        self.segments = []


class VirtualRequest:
    """A started operation of a virtual rank; ``since()`` is the moment from which it is complete, None if nobody knows yet."""

    def __init__(self, comm: VirtualComm, since: Callable[[], float | None], what: str,
                 deliver: Callable[[], None] | None = None, collective: bool = False):
        self._comm, self._since, self._what, self._deliver, self._collective = comm, since, what, deliver, collective
        self._began, self._done = comm.now(), False
        self._asked, self._events = 0, 0

    def Wait(self) -> None:
        if not self._done:
            entered = self._comm.now()
            self._comm.block(self._since, self._what)
            self._finish(entered)

    def Test(self) -> bool:
        if not self._done:
            with booked(self._comm, "waiting"):
                self._comm.block(self._since, "its next turn", asks=True)
            since = self._since()
            if since is not None and since <= self._comm.clock:
                self._finish(self._comm.now())
            else:
                self._be_patient()
        return self._done

    def _be_patient(self) -> None:
        """A rank that asks and asks while nothing happens anywhere is deadlocked, too."""
        events = self._comm.events
        self._asked = self._asked + 1 if events == self._events else 0
        self._events = events
        if self._asked > MOST_ASKED:
            raise CommError(f"virtual ranks are deadlocked: rank {self._comm.rank} waits for {self._what}, which no rank sends")

    def _finish(self, entered: float) -> None:
        if self._deliver is not None:
            self._deliver()
        self._done, left = True, self._comm.now()
        if self._collective:
            self._comm.meter.synchronised(self._began, entered, left)
        else:
            self._comm.meter.waiting += left - entered


def _reduce(parts: dict[int, np.ndarray], op: Op) -> np.ndarray:
    """Left fold in rank order: the same bits whatever the order of arrival."""
    total = parts[0].copy()
    for rank in range(1, len(parts)):
        if parts[rank].shape != total.shape or parts[rank].dtype != total.dtype:
            raise CommError(
                f"all-reduce: rank {rank} passed shape {parts[rank].shape} of {parts[rank].dtype}, "
                f"rank 0 passed shape {total.shape} of {total.dtype}; expected the same shape and dtype"
            )
        _REDUCE[op.name](total, parts[rank], out=total)
    return total
