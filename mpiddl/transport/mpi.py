"""MPI: mpi4py's communicators as a transport.

mpi4py is imported when the first communicator is made, never at ``import mpiddl``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar, overload

import numpy as np

from mpiddl.errors import CommError
from mpiddl.machine.clock import now
from mpiddl.transport.base import (
    ANY_SOURCE,
    ANY_TAG,
    IN_PLACE,
    Collectives,
    Envelope,
    Op,
    Processes,
    Request,
    Transport,
)
from mpiddl.transport.comm import AnyComm, Comm, NodeMemory, raise_held
from mpiddl.transport.in_flight import InFlight
from mpiddl.transport.shared_memory import SharedMemory
from mpiddl.transport.start import load_mpi, start_mpi
from mpiddl.transport.uncaught import end_job, print_once

if TYPE_CHECKING:
    from mpi4py import MPI

C = TypeVar("C", bound=Comm)

Intracomm: TypeAlias = "MPI.Intracomm"
"""A communicator of mpi4py, for annotations."""


@overload
def connect(comm: Comm, env: Mapping[str, str] | None = None) -> Comm: ...


@overload
def connect(comm: MPI.Intracomm | None = None, env: Mapping[str, str] | None = None) -> MpiComm: ...


def connect(comm: AnyComm | None = None, env: Mapping[str, str] | None = None) -> Comm:
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
    if isinstance(comm, Comm):
        return comm.Dup()
    mpi = load_mpi() if comm is not None else start_mpi(env or {})
    comm = mpi.COMM_WORLD if comm is None else comm
    if isinstance(comm, mpi.Comm) and comm == mpi.COMM_NULL:
        raise CommError("comm: got a freed communicator, expected a valid one, or None for COMM_WORLD")
    if not isinstance(comm, mpi.Intracomm):
        raise CommError(f"comm: got {type(comm).__name__}, expected an mpi4py intra-communicator or None for COMM_WORLD")
    return MpiComm.owning(mpi.Intracomm(comm).Dup())  # of a subclass of Intracomm, too: the library's own


@contextmanager
def threads_end_job(link: Comm) -> Iterator[None]:
    """While the block runs, an exception that ends a thread ends the job: other ranks wait for what that thread does."""
    if link.size == 1 or not link.processes:
        yield
        return
    before = threading.excepthook

    def ended(args: Any) -> None:
        if link.freed or args.exc_type is SystemExit:
            before(args)
        else:
            link.end_job(args.exc_value, f" in {args.thread.name if args.thread else 'a thread'}")

    threading.excepthook = ended
    try:
        yield
    finally:
        threading.excepthook = before


@contextmanager
def failing_together(link: C) -> Iterator[C]:
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
def connected(comm: AnyComm | None, env: Mapping[str, str]) -> Iterator[Comm]:
    """`connect` for the length of a block, which ranks leave together; ``env`` counts if ``comm`` is None.

    A communicator of ours lends the same duplicate again and again: what was made for it, topology and shared memory, stays.
    """
    if isinstance(comm, Comm):
        with failing_together(comm.kept("lent", comm.Dup)) as lent:
            raise_held(comm)
            yield lent
        return
    link = connect(comm, env if comm is None else None)
    with failing_together(link):
        yield link
    link.Free()


@contextmanager
def world(env: Mapping[str, str]) -> Iterator[MpiComm]:
    """All ranks of the program, for the length of a block, which they leave together."""
    link = connect(None, env)
    with failing_together(link):
        yield link
    link.Free()


class MpiComm(Comm):
    """A `Comm` on MPI."""

    transport: MpiTransport
    now = staticmethod(now)

    @classmethod
    def owning(cls, raw: Any, ends_jobs: bool = True) -> MpiComm:
        """On an mpi4py communicator, which it owns and frees."""
        print_once()
        transport = MpiTransport(raw)
        return cls(transport, transport.in_flight(), ends_jobs)

    @property
    def raw(self) -> Any:
        """The mpi4py communicator below."""
        return self.transport.raw


class MpiTransport(Transport, Collectives, NodeMemory, Processes):
    """An mpi4py communicator."""

    now = staticmethod(now)

    def __init__(self, raw: Any):
        self.raw = raw
        self.rank, self.size = raw.Get_rank(), raw.Get_size()
        self._mpi = mpi = load_mpi()
        self.error, self.threads = mpi.Exception, mpi.Query_thread() == mpi.THREAD_MULTIPLE

    def send(self, buf: np.ndarray, dest: int, tag: int) -> None:
        self.raw.Send(buf, dest, tag)

    def isend(self, buf: np.ndarray, dest: int, tag: int) -> Request:
        request: Request = self.raw.Isend(buf, dest, tag)
        return request

    def irecv(self, buf: np.ndarray, source: Any, tag: Any) -> Request:
        request: Request = self.raw.Irecv(buf, self._peer(source), self._tag(tag))
        return request

    def recv(self, buf: np.ndarray, source: Any, tag: Any) -> None:
        self.raw.Recv(buf, self._peer(source), self._tag(tag))

    def probe(self, source: Any, tag: Any) -> Envelope:
        status = self._mpi.Status()
        self.raw.Probe(self._peer(source), self._tag(tag), status)
        return Envelope(status.source, status.tag)

    def iprobe(self, source: Any, tag: Any) -> Envelope | None:
        status = self._mpi.Status()
        found = self.raw.Iprobe(self._peer(source), self._tag(tag), status)
        return Envelope(status.source, status.tag) if found else None

    def group(self, ranks: Sequence[int]) -> MpiTransport:
        whole = len(ranks) == self.size and all(rank == place for place, rank in enumerate(ranks))
        return MpiTransport(self.raw.Dup() if whole else self.raw.Split(ranks[0], ranks.index(self.rank)))

    def free(self) -> None:
        self.raw.Free()

    def library(self) -> str:
        return " ".join(self._mpi.Get_library_version().splitlines()[0].split(",")[0].split()).strip("\0")

    def allreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op) -> None:
        self.raw.Allreduce(self._source(sendbuf), recvbuf, self.operation(op))

    def iallreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: Op) -> Request:
        request: Request = self.raw.Iallreduce(self._source(sendbuf), recvbuf, self.operation(op))
        return request

    def bcast(self, buf: np.ndarray, root: int) -> None:
        self.raw.Bcast(buf, root)

    def barrier(self) -> None:
        self.raw.Barrier()

    def ibarrier(self) -> Request:
        request: Request = self.raw.Ibarrier()
        return request

    def allgather(self, mine: bytes) -> list[bytes]:
        found: list[bytes] = self.raw.allgather(mine)
        return found

    def broadcast(self, mine: bytes, root: int) -> bytes:
        found: bytes = self.raw.bcast(mine, root)
        return found

    def operation(self, op: Op) -> Any:
        """What mpi4py calls it."""
        return getattr(self._mpi, op.name)

    def nodes(self) -> list[int]:
        local = self.raw.Split_type(self._mpi.COMM_TYPE_SHARED)
        lowest = local.bcast(self.rank)
        local.Free()
        homes: list[int] = self.raw.allgather(lowest)
        return homes

    def share(self, comm: Comm, nbytes: int) -> SharedMemory:
        return SharedMemory(comm, nbytes)

    def progress(self) -> None:
        self.raw.Iprobe()

    def test_some(self, requests: Sequence[Any]) -> tuple[Sequence[int], Exception | None]:
        try:
            return self._mpi.Request.Testsome(list(requests)) or (), None
        except self.error as error:  # it does not say which of those that it has ended have failed
            return [which for which, raw in enumerate(requests) if raw == self._mpi.REQUEST_NULL], error

    def end_job(self, error: BaseException, where: str) -> NoReturn:
        end_job(self.raw, error, where)

    def in_flight(self) -> InFlight:
        """What this process has under way: MPI keeps it, as an attribute of COMM_SELF."""
        whole = self._mpi.COMM_SELF
        if whole.Get_attr(_keyval()) is None:
            whole.Set_attr(_keyval(), InFlight())
        found: InFlight = whole.Get_attr(_keyval())
        return found

    def _source(self, sendbuf: Any) -> Any:
        return self._mpi.IN_PLACE if sendbuf is IN_PLACE else sendbuf

    def _peer(self, source: Any) -> int:
        return self._mpi.ANY_SOURCE if source is ANY_SOURCE else source

    def _tag(self, tag: Any) -> int:
        return self._mpi.ANY_TAG if tag is ANY_TAG else tag


@cache
def _keyval() -> int:
    """Of the attribute."""
    keyval: int = load_mpi().Comm.Create_keyval()
    return keyval
