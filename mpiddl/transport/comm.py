"""The communicator that strategies and collectives talk through, on any transport; it counts bytes and seconds.

The interface is mpi4py's own, cut down to what strategies use: upper case moves numpy buffers, lower case moves pickled
objects, arguments come as ``(sendbuf, recvbuf, op)``. A strategy written against it runs on real MPI and on virtual ranks
without a change. Departures: `Probe` returns the envelope instead of filling in a status, and `Create` takes ranks.
"""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias, Union

import numpy as np

from mpiddl.errors import CommError, MpiddlError, SharedMemoryError
from mpiddl.memory import aligned_zeros
from mpiddl.transport.base import (
    ANY_SOURCE,
    ANY_TAG,
    SUM,
    Collectives,
    Envelope,
    Op,
    Processes,
    Request,
    Shared,
    Transport,
)
from mpiddl.transport.in_flight import InFlight
from mpiddl.transport.messages import Messages
from mpiddl.transport.meter import Meter, allreduce_bytes, bcast_bytes, booked
from mpiddl.transport.uncaught import GRACE_S

if TYPE_CHECKING:
    from mpi4py import MPI

AnyComm: TypeAlias = Union["MPI.Intracomm", "Comm"]
"""What a user may pass: mpi4py's communicators, or ours."""


class Comm:
    """A communicator on ``transport``, which it owns and frees.

    Parameters
    ----------
    transport : Transport
    started : InFlight
        What this rank has under way, on whatever communicator.
    ends_jobs : bool
        Prepare for `fail`. Parts of a communicator leave that to the whole.

    Attributes
    ----------
    rank, size : int
    meter : Meter
    processes : bool
        Each rank is a process.
    simulated : bool
        The clock tells simulated time.
    freed : bool
    broken : bool
        An exception ended a collective in the middle: no further one can begin.
    held : exception or None
        One of a signal's handler that came before the steps of a collective, which raises it when it is over. Code that calls
        `kept` and begins no collective calls `raise_held`.
    """

    def __init__(self, transport: Transport, started: InFlight, ends_jobs: bool = True):
        self.transport, self.started = transport, started
        self.rank, self.size = transport.rank, transport.size
        self.meter = Meter()
        self.freed = self.broken = False
        self.held: BaseException | None = None
        self.simulated, self.processes = transport.simulated, isinstance(transport, Processes)
        self._transports: list[Transport] = [transport]
        self._collectives = self._library(transport)
        self._alarm = self._library(self._apart()) if ends_jobs and self.processes else None
        self._owned: list[Any] = []  # freed with this one, the youngest first
        self._kept: dict[Any, Any] = {}

    def _library(self, transport: Transport) -> Collectives:
        return transport if isinstance(transport, Collectives) else Messages(self._apart())

    def _apart(self) -> Transport:
        """The same ranks once more."""
        self._transports.append(self.transport.group(range(self.size)))
        return self._transports[-1]

    def sent_bytes(self) -> int:
        """Payload bytes that this rank sent, over this communicator and those that were made from it and are not freed."""
        return self.meter.bytes + sum(each.sent_bytes() for each in self._owned if isinstance(each, Comm))

    def now(self) -> float:
        """This rank's clock, in seconds."""
        return self.transport.now()

    def library(self) -> str:
        """Name and version of what moves the messages."""
        return self.transport.library()

    # Collectives

    def Allreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op = SUM) -> None:
        entered = self.now()
        self._collectives.allreduce(sendbuf, recvbuf, op)
        self._synchronised(entered)
        self.meter.sent(allreduce_bytes(self.size, recvbuf.nbytes))

    def Iallreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op = SUM) -> CommRequest:
        entered = self.now()
        request = self._collectives.iallreduce(sendbuf, recvbuf, op)
        self._spent("moving", entered)
        self.meter.sent(allreduce_bytes(self.size, recvbuf.nbytes))
        return CommRequest(request, self, (sendbuf, recvbuf), collective=True)

    def Bcast(self, buf: np.ndarray, root: int = 0) -> None:
        entered = self.now()
        self._collectives.bcast(buf, root)
        self._synchronised(entered)
        self.meter.sent(bcast_bytes(self.size, buf.nbytes))

    def Barrier(self) -> None:
        entered = self.now()
        self._collectives.barrier()
        self._synchronised(entered)

    def patient_barrier(self, pause_s: float = 0.002) -> None:
        """A barrier that sleeps while it waits, so that a busy rank has the core to itself; it moves on what was started."""
        with booked(self, "waiting"):
            self.wait(self._collectives.ibarrier(), pause_s)

    def allgather(self, obj: Any) -> list[Any]:
        found, nbytes = self._gathered(obj)
        self.meter.sent(bcast_bytes(self.size, nbytes))
        return found

    def setup_allgather(self, obj: Any) -> list[Any]:
        """The same for agreements, and figures about a run: counted in seconds, but not in bytes."""
        return self._gathered(obj)[0]

    def _gathered(self, obj: Any) -> tuple[list[Any], int]:
        """Every rank's object, and their bytes."""
        entered = self.now()
        parts = self._collectives.allgather(pickle.dumps(obj))
        self._synchronised(entered)
        return [pickle.loads(part) for part in parts], sum(map(len, parts))

    def bcast(self, obj: Any, root: int = 0) -> Any:
        entered = self.now()
        found = self._collectives.broadcast(pickle.dumps(obj) if self.rank == root else b"", root)
        self._synchronised(entered)
        self.meter.sent(bcast_bytes(self.size, len(found)))
        return pickle.loads(found)

    # Messages

    def Send(self, buf: np.ndarray, dest: int, tag: int = 0) -> None:
        entered = self.now()
        if self.processes and self.started:
            self.wait(self.transport.isend(buf, dest, tag))
        else:
            self.transport.send(buf, dest, tag)
        self._spent("moving", entered)
        self.meter.sent(buf.nbytes)

    def Isend(self, buf: np.ndarray, dest: int, tag: int = 0) -> CommRequest:
        entered = self.now()
        request = self.transport.isend(buf, dest, tag)
        self.meter.moving += self.now() - entered
        self.meter.sent(buf.nbytes)
        return CommRequest(request, self, (buf,))

    def Irecv(self, buf: np.ndarray, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> CommRequest:
        return CommRequest(self.transport.irecv(buf, source, tag), self, (buf,))

    def Recv(self, buf: np.ndarray, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> None:
        if self.processes:
            source, tag = self.Probe(source, tag)
        entered = self.now()
        self.transport.recv(buf, source, tag)
        self._spent("moving" if self.processes else "waiting", entered)

    def Sendrecv(
        self, sendbuf: np.ndarray, dest: int, sendtag: int, recvbuf: np.ndarray, source: int, recvtag: int
    ) -> None:
        request = self.Isend(sendbuf, dest, sendtag)
        self.Recv(recvbuf, source, recvtag)
        request.Wait()

    def Probe(self, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> Envelope:
        entered = self.now()
        while self.processes and self.started and self.transport.iprobe(source, tag) is None:
            self.started.move_on()
        found = self.transport.probe(source, tag)
        self._spent("waiting", entered)
        return found

    def Iprobe(self, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> Envelope | None:
        """The envelope of a message that has come, if one has."""
        return self.transport.iprobe(source, tag)

    # Communicators and memory

    def Dup(self) -> Self:
        """A communicator of the same ranks, freed with this one at the latest."""
        return self._own(type(self)(self.transport.group(range(self.size)), self.started))

    def Create(self, ranks: Sequence[int]) -> Self:
        """A communicator of these ranks, in this order; freed with this one at the latest.

        Collective over all ranks of this one. Each names the ranks of its own group, itself among them.
        """
        with booked(self, "waiting"):
            return self._own(type(self)(self.transport.group(ranks), self.started, ends_jobs=False))

    def Split(self, color: int, key: int = 0) -> Self:
        """The ranks that gave the same ``color``, in the order of ``key``; freed with this one at the latest."""
        told = self.setup_allgather((color, key))
        return self.Create([rank for _, rank in sorted((its[1], rank) for rank, its in enumerate(told) if its[0] == color)])

    def nodes(self) -> list[int]:
        """For each rank the lowest rank of its node; where nothing is known of nodes, each rank is one."""
        return self.transport.nodes() if isinstance(self.transport, NodeMemory) else list(range(self.size))

    def share(self, nbytes: int) -> Shared:
        """Memory in common for the ranks of this communicator, which are on one node; freed with it at the latest."""
        try:
            if isinstance(self.transport, NodeMemory):
                with booked(self, "waiting"):
                    return self._own(self.transport.share(self, nbytes))
            if self.size > 1:
                raise SharedMemoryError(f"shared memory: got {self.library()}, which has none, expected one rank a node")
            return OwnMemory(nbytes)
        except MpiddlError:
            raise
        except BaseException:  # of this rank alone: the others are in the middle of it
            self.broken = True
            raise

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gave when ``key`` was first asked for; its ``Free``, if it has one, is called with this one's.

        Collective at first.
        """
        if key not in self._kept or getattr(self._kept[key], "freed", False):
            try:
                if self.processes:
                    self._meet()
                with nullcontext() if self.processes else booked(self, "waiting"):  # simulated time passes in its messages only
                    self._kept[key] = made = make()
            except MpiddlError as error:  # of all ranks: no collective comes that would raise what is held
                if self.held is not None:
                    held, self.held = self.held, None
                    raise held from error
                raise
            except BaseException:
                self.broken = True
                raise
            if hasattr(made, "Free"):
                self._own(made)
        return self._kept[key]

    def _meet(self) -> None:
        """A barrier that moves on what was started, for which others may wait before they come."""
        request = self._collectives.ibarrier()
        try:
            with booked(self, "waiting"):
                self.wait(request)
        except BaseException as error:  # of a signal's handler: held back until the collective is over
            if self.held is not None:
                raise
            self.held = error
            self.wait(request)

    def Free(self) -> None:
        """Collective, as is the freeing of all that belongs to it."""
        self.freed = True
        self._kept.clear()
        while self._owned:
            self._owned.pop().Free()
        while self._transports:
            self._transports.pop().free()

    def _own(self, thing: Any) -> Any:
        self._owned = [other for other in self._owned if not getattr(other, "freed", False)] + [thing]
        return thing

    # Progress and failure

    def progress(self) -> None:
        """Let the library move messages: those started need not go on by themselves."""
        if isinstance(self.transport, Processes):
            self.transport.progress()

    def check_threads(self) -> None:
        """Raise a `CommError`, on every rank, unless several threads may call the library at a time."""
        if not isinstance(self.transport, Processes):
            raise CommError(f"threads: got {self.library()}, expected MPI ranks, which a progress thread needs")
        if not self.transport.threads:
            raise CommError(f"threads: {self.library()} was started without MPI_THREAD_MULTIPLE, which a progress thread "
                            "needs; call Test() on requests during the computation instead")

    def test_some(self, requests: Sequence[Any]) -> list[bool]:
        """Whether each may be complete: one call of the library for all that are its own, True for the others."""
        done = [True] * len(requests)
        if not isinstance(self.transport, Processes):
            return done
        own = [number for number, request in enumerate(requests)
               if isinstance(request, CommRequest) and request.under_way and request.processes]
        if own:
            for number in own:
                done[number] = False
            over, error = self.transport.test_some([requests[number].raw for number in own])
            for which in over:
                requests[own[which]].failure = error
                done[own[which]] = True
        return done

    def wait(self, request: Request, pause_s: float = 0.0) -> None:
        """Wait for one of the library's requests, and move on what else this rank has started: others may wait for that."""
        while not request.Test():
            self.started.move_on()
            if self.processes:
                time.sleep(pause_s)

    def fail(self, error: BaseException) -> None:
        """Called where ``error`` is about to leave the SPMD region. Returns if all ranks failed; else ends the job.

        A failing rank starts a barrier that only failing ranks enter. If all are there within the grace, they failed
        together and each can raise; if not, the others would wait for this rank for ever: its traceback is printed and
        the job ends. Virtual ranks have nothing to agree on: their `run` ends all of them with the first failure.
        """
        if self.size == 1 or self._alarm is None or getattr(error, "agreed", 0) >= self.size:
            return
        request = self._alarm.ibarrier()
        deadline = self.now() + GRACE_S
        while not request.Test():
            if self.now() > deadline:
                self.end_job(error)
            time.sleep(0.005)
        error.agreed, error.speaks = self.size, self.rank == 0  # type: ignore[attr-defined]
        error.ranks = getattr(error, "ranks", f"all {self.size} ranks")  # type: ignore[attr-defined]

    def end_job(self, error: BaseException, where: str = "") -> None:
        """Print ``error``, which this rank alone has met, and end the job."""
        if isinstance(self.transport, Processes):
            self.transport.end_job(error, where)

    def _synchronised(self, entered: float) -> None:
        self.meter.synchronised(entered, entered, self.now())

    def _spent(self, phase: str, entered: float) -> None:
        setattr(self.meter, phase, getattr(self.meter, phase) + self.now() - entered)


class NodeMemory(ABC):
    """Ranks of which some share memory."""

    @abstractmethod
    def nodes(self) -> list[int]:
        """For each rank the lowest rank of its node. Collective."""

    @abstractmethod
    def share(self, comm: Comm, nbytes: int) -> Shared:
        """Memory in common for the ranks of ``comm``, all on one node: ``nbytes`` of this rank. Collective."""


class CommRequest:
    """A started operation; keeps its buffers alive until it is complete.

    ``failure``: what the library has raised. Its handle is null since then, which passes for complete, so it is raised again.
    """

    failure: BaseException | None = None

    def __init__(self, raw: Request, comm: Comm, buffers: tuple[Any, ...], collective: bool = False):
        self.raw, self._comm, self._buffers, self._collective = raw, comm, buffers, collective
        self._began = comm.now()

    def Wait(self) -> None:
        if self._buffers:
            entered, comm = self._comm.now(), self._comm
            self._ask(partial(comm.wait, self.raw) if comm.processes and comm.started.idle() else self.raw.Wait)
            self._done(entered)

    @property
    def under_way(self) -> bool:
        """Whether it has not been found complete yet."""
        return bool(self._buffers)

    @property
    def processes(self) -> bool:
        """It is one of a library of `Processes`."""
        return self._comm.processes

    def Test(self) -> bool:
        if self._buffers:
            entered = self._comm.now()
            over = self._ask(self.raw.Test)
            left = self._comm.now()
            self._book(left - entered)
            if over:
                self._done(left)
        return not self._buffers

    def _ask(self, how: Callable[[], Any]) -> Any:
        if self.failure is not None:
            raise self.failure
        try:
            return how()
        except self._comm.transport.error as error:
            self.failure = error
            raise

    def _done(self, entered: float) -> None:
        if self._collective:
            self._comm.meter.synchronised(self._began, entered, self._comm.now())
        else:
            self._book(self._comm.now() - entered)
        self._buffers = ()

    def _book(self, seconds: float) -> None:
        if self._comm.processes:
            self._comm.meter.moving += seconds
        else:
            self._comm.meter.waiting += seconds


class OwnMemory:
    """Memory of a node with one rank."""

    def __init__(self, nbytes: int):
        self.segments = [aligned_zeros(nbytes, np.uint8)]
        self.barrier = ()

    def meet(self) -> Over:
        return Over()

    def Free(self) -> None:
        self.segments = []


class Over:
    """A request that is complete."""

    def Wait(self) -> None:
        pass

    def Test(self) -> bool:
        return True


def raise_held(comm: Comm) -> None:
    """Raise what ``comm`` has held back, once; nobody waits for this rank now."""
    error, comm.held = comm.held, None
    if error is not None:
        raise error
