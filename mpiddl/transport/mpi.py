"""Real MPI: mpi4py's communicator behind the interface of `mpiddl.transport.base`, counted and timed.

mpi4py is imported when the first communicator is made, never at ``import mpiddl``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from mpiddl.errors import CommError, MpiddlError
from mpiddl.machine.clock import now
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
    raise_held,
)
from mpiddl.transport.shared_memory import SharedMemory
from mpiddl.transport.start import load_mpi, start_mpi
from mpiddl.transport.uncaught import GRACE_S, end_job, print_once, threads_end_job

_STARTED: list[Any] = []


def connect(comm: Any = None, env: Any = None) -> Any:
    """A communicator of our own on the ranks of ``comm``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or Comm, optional
        The ranks to work with; None means ``MPI.COMM_WORLD``. It is duplicated, never used itself.
    env : mapping, optional
        The environment in which a launcher may have promised a number of ranks; None checks no promise.

    Returns
    -------
    Comm
        To be freed with ``Free()``.

    Raises
    ------
    CommError
        On every rank: no MPI library; ``comm`` is no intra-communicator; the launcher promised more ranks than came up
        (each rank believes to be alone).

    Communication
    -------------
    Collective over ``comm``: two duplications.
    """
    if comm is not None and hasattr(comm, "meter"):
        return comm.Dup()
    MPI = load_mpi() if comm is not None else start_mpi(env or {})
    comm = MPI.COMM_WORLD if comm is None else comm
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise CommError("comm: got a freed communicator, expected a valid one, or None for COMM_WORLD")
    if not isinstance(comm, MPI.Intracomm):
        raise CommError(f"comm: got {type(comm).__name__}, expected an mpi4py intra-communicator or None for COMM_WORLD")
    return MpiComm(MPI.Intracomm(comm).Dup())  # of a subclass of Intracomm, too: the library's own


@contextmanager
def failing_together(link: Any) -> Iterator[Any]:
    """An exception leaves the block on all ranks of ``link``, or, where it is one rank's alone, ends the job."""
    try:
        with threads_end_job(link):
            yield link
            raise_held(link)
    except BaseException as error:
        link.fail(error)
        link.Free()  # all ranks are here
        raise


@contextmanager
def connected(comm: Any, env: Any) -> Iterator[Any]:
    """`connect` for the length of a block, which ranks leave together; ``env`` counts if ``comm`` is None.

    A communicator of ours lends the same duplicate again and again: what was made for it, topology and shared memory, stays.
    """
    if hasattr(comm, "meter"):
        with failing_together(comm.kept("lent", comm.Dup)) as lent:
            raise_held(comm)
            yield lent
        return
    link = connect(comm, env if comm is None else None)
    with failing_together(link):
        yield link
    link.Free()


class MpiComm:
    """An mpi4py communicator that counts bytes and seconds. It owns ``raw`` and frees it.

    ``ends_jobs`` prepares for `fail`; parts of a communicator leave that to the whole.
    """

    simulated = False
    processes = True
    now = staticmethod(now)

    def __init__(self, raw: Any, ends_jobs: bool = True):
        self.raw = raw
        self.rank: int = raw.Get_rank()
        self.size: int = raw.Get_size()
        self.meter = Meter()
        self.freed = False
        self.broken = False
        self.held: BaseException | None = None
        self.started = _STARTED
        self._mpi = load_mpi()
        # On which failing ranks find each other, apart from all other traffic.
        self._alarm = raw.Dup() if ends_jobs else self._mpi.COMM_NULL
        self._owned: list[Any] = []  # freed with this one, the youngest first
        self._kept: dict[Any, Any] = {}
        print_once()

    def operation(self, op: Op) -> Any:
        """What mpi4py calls it."""
        return getattr(self._mpi, op.name)

    def Allreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op = SUM) -> None:
        entered = now()
        self.raw.Allreduce(self._source(sendbuf), recvbuf, self.operation(op))
        self._synchronised(entered, entered)
        self.meter.sent(allreduce_bytes(self.size, recvbuf.nbytes))

    def Iallreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op = SUM) -> MpiRequest:
        entered = now()
        request = self.raw.Iallreduce(self._source(sendbuf), recvbuf, self.operation(op))
        self.meter.moving += now() - entered
        self.meter.sent(allreduce_bytes(self.size, recvbuf.nbytes))
        return MpiRequest(request, self, (sendbuf, recvbuf), collective=True)

    def Bcast(self, buf: np.ndarray, root: int = 0) -> None:
        entered = now()
        self.raw.Bcast(buf, root)
        self._synchronised(entered, entered)
        self.meter.sent(bcast_bytes(self.size, buf.nbytes))

    def Barrier(self) -> None:
        entered = now()
        self.raw.Barrier()
        self._synchronised(entered, entered)

    def patient_barrier(self, pause_s: float = 0.002) -> None:
        """A barrier that sleeps while it waits, so that a busy rank has the core to itself; it moves on what was started."""
        with booked(self, "waiting"):
            self.wait(self.raw.Ibarrier(), pause_s)

    def allgather(self, obj: Any) -> list[Any]:
        entered = now()
        found: list[Any] = self.raw.allgather(obj)
        self._synchronised(entered, entered)
        return found

    def bcast(self, obj: Any, root: int = 0) -> Any:
        entered = now()
        found = self.raw.bcast(obj, root)
        self._synchronised(entered, entered)
        return found

    def Send(self, buf: np.ndarray, dest: int, tag: int = 0) -> None:
        entered = now()
        self.wait(self.raw.Isend(buf, dest, tag)) if self.started else self.raw.Send(buf, dest, tag)
        self.meter.moving += now() - entered
        self.meter.sent(buf.nbytes)

    def Isend(self, buf: np.ndarray, dest: int, tag: int = 0) -> MpiRequest:
        entered = now()
        request = self.raw.Isend(buf, dest, tag)
        self.meter.moving += now() - entered
        self.meter.sent(buf.nbytes)
        return MpiRequest(request, self, (buf,))

    def Irecv(self, buf: np.ndarray, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> MpiRequest:
        return MpiRequest(self.raw.Irecv(buf, self._peer(source), self._tag(tag)), self, (buf,))

    def Recv(self, buf: np.ndarray, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> None:
        envelope = self.Probe(source, tag)
        entered = now()
        self.raw.Recv(buf, envelope.source, envelope.tag)
        self.meter.moving += now() - entered

    def Sendrecv(
        self, sendbuf: np.ndarray, dest: int, sendtag: int, recvbuf: np.ndarray, source: int, recvtag: int
    ) -> None:
        request = self.Isend(sendbuf, dest, sendtag)
        self.Recv(recvbuf, source, recvtag)
        request.Wait()

    def Probe(self, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> Envelope:
        entered = now()
        status = self._mpi.Status()
        while self.started and not self.raw.Iprobe(self._peer(source), self._tag(tag), status):
            self._move_on()
        self.raw.Probe(self._peer(source), self._tag(tag), status)
        self.meter.waiting += now() - entered
        return Envelope(status.source, status.tag)

    def Iprobe(self, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> Envelope | None:
        """The envelope of a message that has come, if one has."""
        status = self._mpi.Status()
        found = self.raw.Iprobe(self._peer(source), self._tag(tag), status)
        return Envelope(status.source, status.tag) if found else None

    def Dup(self) -> MpiComm:
        """A communicator of the same ranks, freed with this one at the latest."""
        return self._own(MpiComm(self.raw.Dup()))

    def Split(self, color: int, key: int = 0) -> MpiComm:
        """The ranks that gave the same ``color``, in the order of ``key``; freed with this one at the latest."""
        with booked(self, "waiting"):
            return self._own(MpiComm(self.raw.Split(color, key), ends_jobs=False))

    def local_ranks(self) -> MpiComm:
        """The ranks of this communicator that share this node's memory."""
        return MpiComm(self.raw.Split_type(self._mpi.COMM_TYPE_SHARED))

    def nodes(self) -> list[int]:
        """For each rank the lowest rank of its node."""
        local = self.raw.Split_type(self._mpi.COMM_TYPE_SHARED)
        lowest = local.bcast(self.rank)
        local.Free()
        return self.raw.allgather(lowest)

    def share(self, nbytes: int) -> SharedMemory:
        """Memory in common for the ranks of this communicator, which are on one node; freed with it at the latest."""
        try:
            return self._own(SharedMemory(self, nbytes))
        except MpiddlError:
            raise
        except BaseException:  # of this rank alone: the others are in the middle of it
            self.broken = True
            raise

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gave when ``key`` was first asked for; its ``Free``, if it has one, is called with this one's."""
        if key not in self._kept or getattr(self._kept[key], "freed", False):
            request = self.raw.Ibarrier()
            try:
                try:
                    with booked(self, "waiting"):
                        self.wait(request)
                except BaseException as error:  # of a signal's handler: held back until the collective is over
                    if self.held is not None:
                        raise
                    self.held = error
                    self.wait(request)
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

    def progress(self) -> None:
        """Let the library move messages: those started need not go on by themselves."""
        self.raw.Iprobe()

    def library(self) -> str:
        """Name and version of the MPI library."""
        return " ".join(self._mpi.Get_library_version().splitlines()[0].split(",")[0].split()).strip("\0")

    def Free(self) -> None:
        """Collective, as is the freeing of all that belongs to it."""
        self.freed = True
        self._kept.clear()
        while self._owned:
            self._owned.pop().Free()
        for handle in (self._alarm, self.raw):
            if handle != self._mpi.COMM_NULL:
                handle.Free()

    def fail(self, error: BaseException) -> None:
        """Called where ``error`` is about to leave the SPMD region. Returns if all ranks failed; else ends the job.

        A failing rank starts a barrier that only failing ranks enter. If all are there within the grace, they failed
        together and each can raise; if not, the others would wait for this rank for ever: its traceback is printed and
        the job ends.
        """
        if self.size == 1 or getattr(error, "agreed", 0) >= self.size:
            return
        request = self._alarm.Ibarrier()
        deadline = now() + GRACE_S
        while not request.Test():
            if now() > deadline:
                end_job(self.raw, error)
            time.sleep(0.005)
        error.agreed, error.speaks = self.size, self.rank == 0  # type: ignore[attr-defined]
        error.ranks = getattr(error, "ranks", f"all {self.size} ranks")  # type: ignore[attr-defined]

    def check_threads(self) -> None:
        """Raise a `CommError`, on every rank, unless several threads may call the library at a time."""
        if self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            raise CommError(
                f"threads: {self.library()} was started without MPI_THREAD_MULTIPLE, which a progress thread needs; "
                "call Test() on requests during the computation instead"
            )

    def test_some(self, requests: Sequence[Any]) -> list[bool]:
        """Whether each may be complete: one call of the library for all that are its own, True for the others."""
        own = [number for number, request in enumerate(requests) if isinstance(request, MpiRequest) and request.under_way]
        done = [True] * len(requests)
        if own:
            for number in own:
                done[number] = False
            raws = [requests[number].raw for number in own]
            try:
                over = self._mpi.Request.Testsome(raws) or ()
            except self._mpi.Exception as error:  # it does not say which of those that it has ended have failed
                over = [which for which, raw in enumerate(raws) if raw == self._mpi.REQUEST_NULL]
                for which in over:
                    requests[own[which]].failure = error
            for which in over:
                done[own[which]] = True
        return done

    def wait(self, request: Any, pause_s: float = 0.0) -> None:
        """Wait for one of the library's requests, and move on what else this rank has started: others may wait for that."""
        while not request.Test():
            self._move_on()
            time.sleep(pause_s)

    def _move_on(self) -> None:
        for started in list(self.started):
            started.move_on()

    def _own(self, thing: Any) -> Any:
        self._owned = [other for other in self._owned if not getattr(other, "freed", False)] + [thing]
        return thing

    def _synchronised(self, arrived: float, entered: float) -> None:
        self.meter.synchronised(arrived, entered, now())

    def _source(self, sendbuf: Any) -> Any:
        return self._mpi.IN_PLACE if sendbuf is IN_PLACE else sendbuf

    def _peer(self, source: Any) -> int:
        return self._mpi.ANY_SOURCE if source is ANY_SOURCE else source

    def _tag(self, tag: Any) -> int:
        return self._mpi.ANY_TAG if tag is ANY_TAG else tag


class MpiRequest:
    """A started operation; keeps its buffers alive until it is complete.

    ``failure``: what the library has raised. Its handle is null since then, which passes for complete, so it is raised again.
    """

    failure: BaseException | None = None

    def __init__(self, raw: Any, comm: MpiComm, buffers: tuple[Any, ...], collective: bool = False):
        self.raw, self._comm, self._meter, self._buffers, self._collective = raw, comm, comm.meter, buffers, collective
        self._began = now()

    def Wait(self) -> None:
        entered = now()
        patient = any(started.idle for started in self._comm.started)
        self._ask(partial(self._comm.wait, self.raw) if patient else self.raw.Wait)
        self._done(entered)

    @property
    def under_way(self) -> bool:
        """Whether it has not been found complete yet."""
        return bool(self._buffers)

    def Test(self) -> bool:
        if self._buffers:
            entered = now()
            over = self._ask(self.raw.Test)
            left = now()
            self._meter.moving += left - entered
            if over:
                self._done(left)
        return not self._buffers

    def _ask(self, how: Callable[[], Any]) -> Any:
        if self.failure is not None:
            raise self.failure
        try:
            return how()
        except self._comm._mpi.Exception as error:
            self.failure = error
            raise

    def _done(self, entered: float) -> None:
        if not self._buffers:
            return
        left = now()
        if self._collective:
            self._meter.synchronised(self._began, entered, left)
        else:
            self._meter.moving += left - entered
        self._buffers = ()
