"""W virtual ranks in one process, deterministic: the same program, strategy or whole training run, without MPI.

Each rank is a thread, but only the one that holds the baton runs; it hands the baton on, in rank order, where it would
block. So a program takes the same path every time, a receive nobody answers is found at once (`CommError` naming what
each rank waits for) instead of hanging, and W up to a few hundred needs no cluster.

Cost: a message is one copy; a switch of ranks is one thread hand-over, about 10 microseconds.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpiddl.errors import CommError, UsageError
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
)
from mpiddl.transport.turns import Turns

MOST_ASKED = 10_000  # far more turns than any rank computes between two messages while others wait
_REDUCE = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum, "PROD": np.multiply}


def run(size: int, program: Callable[[VirtualComm], Any], nodes: Sequence[int] | None = None) -> list[Any]:
    """Run ``program(comm)`` on ``size`` virtual ranks; return what each returned, in rank order.

    ``nodes`` says on which virtual node each rank is, ``(0, 0, 1, 1)`` for two of two; by default all are on one.

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
        raise UsageError(f"size: got {size}, wanted 1 rank or more")
    if nodes is not None and len(nodes) != size:
        raise UsageError(f"nodes: got {len(nodes)} numbers, wanted one for each of {size} ranks")
    world = _World(size, list(nodes or [0] * size))
    return world.run(lambda rank: program(VirtualComm(world, rank, range(size))))


@dataclass
class _Gathering:
    """One collective call on its way: what the ranks have brought, and the outcome once all have."""

    what: str
    brought: dict[int, Any] = field(default_factory=dict)
    outcome: Any = None
    done: bool = False


class _World(Turns):
    """What the virtual ranks share: the baton, the mailboxes and the collectives on their way."""

    def __init__(self, size: int, nodes: list[int]):
        super().__init__(size)
        self.nodes = nodes
        self.mail: dict[tuple[Any, int], list[tuple[int, int, np.ndarray]]] = {}
        self.gatherings: dict[tuple[Any, int], _Gathering] = {}
        self.started: list[list[Any]] = [[] for _ in range(size)]
        self.events = 0  # messages and collective calls so far: while none comes, asking again is of no use


class VirtualComm:
    """The communicator of one virtual rank; made by `run`, duplicated by `Dup`, cut by `Split`."""

    def __init__(self, world: _World, rank: int, members: Sequence[int], context: tuple[Any, ...] = ()):
        self.rank, self.size = rank, len(members)
        self.meter = Meter()
        self.freed = self.broken = False
        self.held: BaseException | None = None
        self.started = world.started[members[rank]]
        self._world, self._members, self._context = world, members, context
        self._calls = 0  # collectives so far: the n-th call of every rank belongs together
        self._children = 0
        self._kept: dict[Any, Any] = {}

    def Allreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op = SUM) -> None:
        self.Iallreduce(sendbuf, recvbuf, op).Wait()

    def Iallreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op = SUM) -> VirtualRequest:
        mine = np.array(recvbuf if sendbuf is IN_PLACE else sendbuf)
        self.meter.sent(allreduce_bytes(self.size, mine.nbytes))
        gathering = self._bring(mine, lambda parts: _reduce(parts, op), f"an all-reduce ({op.name})")

        def deliver() -> None:
            recvbuf[...] = gathering.outcome.reshape(recvbuf.shape)

        return VirtualRequest(self, lambda: gathering.done, "an all-reduce", deliver)

    def Bcast(self, buf: np.ndarray, root: int = 0) -> None:
        self._check_rank("root", root)
        self.meter.sent(bcast_bytes(self.size, buf.nbytes))
        buf[...] = self._together(np.array(buf), lambda parts: parts[root], f"a broadcast from {root}")

    def Barrier(self) -> None:
        self._together(None, lambda parts: None, "a barrier")

    def patient_barrier(self, pause_s: float = 0.002) -> None:
        request = self.meet()
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
        self._world.mail.setdefault((self._context, dest), []).append((self.rank, tag, np.array(buf)))
        self._world.events += 1
        self.meter.sent(buf.nbytes)

    def Isend(self, buf: np.ndarray, dest: int, tag: int = 0) -> VirtualRequest:
        self.Send(buf, dest, tag)
        return VirtualRequest(self, lambda: True, "nothing")

    def Irecv(self, buf: np.ndarray, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> VirtualRequest:
        what = f"a message from {source} under tag {tag}"
        return VirtualRequest(
            self, lambda: self._find(source, tag) is not None, what, lambda: self._take(buf, source, tag)
        )

    def Recv(self, buf: np.ndarray, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> None:
        self.Irecv(buf, source, tag).Wait()

    def Sendrecv(
        self, sendbuf: np.ndarray, dest: int, sendtag: int, recvbuf: np.ndarray, source: int, recvtag: int
    ) -> None:
        self.Send(sendbuf, dest, sendtag)
        self.Recv(recvbuf, source, recvtag)

    def Probe(self, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> Envelope:
        self.block(lambda: self._find(source, tag) is not None, f"any message from {source} under tag {tag}")
        index = self._find(source, tag)
        assert index is not None  # block() returned
        sender, its_tag, _ = self._inbox()[index]
        return Envelope(sender, its_tag)

    def Dup(self) -> VirtualComm:
        self._children += 1
        return VirtualComm(self._world, self.rank, self._members, (*self._context, self._children))

    def Split(self, color: int, key: int = 0) -> VirtualComm:
        self._children += 1
        everyone = enumerate(self.allgather((color, key)))
        order = sorted((its_key, rank) for rank, (its_color, its_key) in everyone if its_color == color)
        ranks = [rank for _, rank in order]
        members = [self._members[rank] for rank in ranks]
        return VirtualComm(self._world, ranks.index(self.rank), members, (*self._context, self._children, color))

    def local_ranks(self) -> VirtualComm:
        return self.Split(self.nodes()[self.rank])

    def nodes(self) -> list[int]:
        theirs = [self._world.nodes[member] for member in self._members]
        return [theirs.index(node) for node in theirs]

    def share(self, nbytes: int) -> VirtualShared:
        return VirtualShared(self, nbytes)

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._kept or getattr(self._kept[key], "freed", False):
            self._kept[key] = make()
        return self._kept[key]

    def progress(self) -> None:
        """Messages of virtual ranks are there as soon as they are sent."""

    def library(self) -> str:
        return "virtual ranks in one process"

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
        raise CommError("threads: virtual ranks take turns, wanted ranks of their own for a progress thread")

    @property
    def events(self) -> int:
        """Messages and collective calls of all ranks so far."""
        return self._world.events

    def block(self, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until ``ready()``."""
        self._world.wait(self._members[self.rank], ready, what)

    def meet(self) -> VirtualRequest:
        """A barrier that need not be waited for."""
        gathering = self._bring(None, lambda parts: None, "a meeting")
        return VirtualRequest(self, lambda: gathering.done, "a meeting")

    def exchanged(self, mine: np.ndarray) -> list[np.ndarray]:
        """Every rank's array itself, no copy of it."""
        parts = self._together(mine, dict, "an exchange of memory")
        return [parts[rank] for rank in range(self.size)]

    def _inbox(self) -> list[tuple[int, int, np.ndarray]]:
        return self._world.mail.setdefault((self._context, self.rank), [])

    def _find(self, source: Any, tag: Any) -> int | None:
        for index, (sender, its_tag, _) in enumerate(self._inbox()):
            if source in (ANY_SOURCE, sender) and tag in (ANY_TAG, its_tag):
                return index
        return None

    def _take(self, buf: np.ndarray, source: Any, tag: Any) -> None:
        index = self._find(source, tag)
        assert index is not None  # the request was ready
        _, _, payload = self._inbox().pop(index)
        if payload.size > buf.size or payload.dtype != buf.dtype:
            raise CommError(f"message: got {payload.size} {payload.dtype}, the buffer takes {buf.size} {buf.dtype}")
        buf.reshape(-1)[: payload.size] = payload.reshape(-1)

    def _check_rank(self, argument: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise CommError(f"{argument}: got {rank}, wanted a rank from 0 to {self.size - 1}")

    def _bring(self, mine: Any, combine: Callable[[dict[int, Any]], Any], what: str) -> _Gathering:
        """Add this rank's part to its next collective; the last rank to come combines the parts in rank order."""
        key = (self._context, self._calls)
        self._calls += 1
        gathering = self._world.gatherings.setdefault(key, _Gathering(what))
        if gathering.what != what:
            raise CommError(f"collective calls do not match: rank {self.rank} calls {what}, others {gathering.what}")
        self._world.events += 1
        gathering.brought[self.rank] = mine
        if len(gathering.brought) == self.size:
            gathering.outcome, gathering.done = combine(gathering.brought), True
            del self._world.gatherings[key]
        return gathering

    def _together(self, mine: Any, combine: Callable[[dict[int, Any]], Any], what: str) -> Any:
        gathering = self._bring(mine, combine, what)
        self.block(lambda: gathering.done, what)
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
    """A started operation of a virtual rank."""

    def __init__(self, comm: VirtualComm, ready: Callable[[], bool], what: str, deliver: Callable[[], None] | None = None):
        self._comm, self._ready, self._what, self._deliver = comm, ready, what, deliver
        self._done = False
        self._asked, self._events = 0, 0

    def Wait(self) -> None:
        if not self._done:
            self._comm.block(self._ready, self._what)
            self._finish()

    def Test(self) -> bool:
        if not self._done:
            self._comm.block(lambda: True, "its next turn")
            if self._ready():
                self._finish()
            else:
                self._be_patient()
        return self._done

    def _be_patient(self) -> None:
        """A rank that asks and asks while nothing happens anywhere is deadlocked, too."""
        events = self._comm.events
        self._asked = self._asked + 1 if events == self._events else 0
        self._events = events
        if self._asked > MOST_ASKED:
            raise CommError(f"virtual ranks are deadlocked: rank {self._comm.rank} asks for {self._what}, which nobody sends")

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
                f"all-reduce: rank {rank} brought {parts[rank].shape} {parts[rank].dtype}, "
                f"rank 0 {total.shape} {total.dtype}; wanted the same on every rank"
            )
        _REDUCE[op.name](total, parts[rank], out=total)
    return total
