"""Our collectives under way as requests of MPI's own kind, so that ``MPI.Request.Waitall`` takes them beside the library's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from traceback import print_exception
from typing import Any

from mpi4py import MPI

from mpiddl.machine.launch import library
from mpiddl.progress.started import Started
from mpiddl.transport.buffers import TAGS, to_oneself


class Job:
    """A collective, and the error of the work after it, if there was one.

    awaited : the program has called ``Wait`` or ``Test`` of this request, and gets the error there.
    """

    def __init__(self, started: Started):
        self.started, self.awaited = started, False
        self.error: BaseException | None = None

    def check(self) -> None:
        error = self.started.failure or self.error
        if error is not None:
            raise error


class CollectiveRequest(MPI.Request):
    """A request whose ``Wait`` and ``Test`` move the collective on themselves; in ``Waitall`` ... a thread does.

    What goes wrong these two raise as it is; ``Waitall`` ... show it on stderr and raise an ``MPI.Exception``.
    """

    _job: Job | None = None

    def Wait(self, status: Any = None) -> Any:
        self._go_on(Started.Wait)
        return MPI.Request.Wait(self, status)

    def Test(self, status: Any = None) -> bool:
        self._go_on(Started.Test)
        return self._job is None and MPI.Request.Test(self, status)

    def _go_on(self, how: Callable[[Started], Any]) -> None:
        """After an error of what is over the request is null, as one of the library's."""
        job = self._job
        if job is None:
            return
        job.awaited = True
        try:
            how(job.started)
            if not job.started.over:
                return
            job.started.then(job.check)  # behind what another thread may still be about
        except BaseException:
            if job.started.over:
                self._job = None
                MPI.Request.Free(self)
            raise
        self._job = None

    def Cancel(self) -> None:
        """Collectives cannot be cancelled."""
        raise MPI.Exception(MPI.ERR_REQUEST)

    cancel = Cancel

    def wait(self, status: Any = None) -> Any:
        self.Wait(status)

    def test(self, status: Any = None) -> tuple[bool, Any]:
        return self.Test(status), None


def request_of(started: Started, buffers: Any, finish: Callable[[], None]) -> CollectiveRequest:
    """A request for ``started``; ``finish`` is called once it is over, ``buffers`` are kept until then."""
    job = Job(started)
    stands_for, end = (_generalized if _is_open_mpi() else _message)(job)
    request = CollectiveRequest.__new__(CollectiveRequest, stands_for)
    request._job = job
    kept = [buffers]

    def complete() -> None:
        try:
            if started.failure is None:
                finish()
        except BaseException as error:  # whoever waits for it is told
            job.error = error
        finally:
            kept.clear()
            end()

    started.then(complete)
    return request


@cache
def _is_open_mpi() -> bool:
    return library(MPI.Get_library_version())[0] == "openmpi"


def _generalized(job: Job) -> tuple[MPI.Request, Callable[[], None]]:
    """A request, and what ends it. MPI has this kind for programs, but MPICH 5.0 ends the process where ``Waitall`` gets one
    beside a null request."""
    request = MPI.Grequest.Start(_query, None, None, (job,))
    return request, request.Complete


def _query(status: Any, job: Job) -> None:
    """MPI asks for a status: that of an empty message, as the library's own collectives have."""
    job.check()
    status.Set_source(MPI.ANY_SOURCE)
    status.Set_tag(MPI.ANY_TAG)
    status.Set_elements(MPI.BYTE, 0)
    status.Set_cancelled(False)


def _message(job: Job) -> tuple[MPI.Request, Callable[[], None]]:
    """The same as a receive from this rank itself. At the end this rank sends an empty message, or, after an error, one that is
    too long for the receive. Open MPI 5.0 reports no error in ``Waitall`` for a receive that has failed before."""
    own, tag = to_oneself("requests"), next(TAGS)

    def end() -> None:
        error = job.started.failure or job.error
        if error is not None and not job.awaited:
            print_exception(error)
        own.Send(b"" if error is None else b"!", 0, tag)

    return own.Irecv(bytearray(), 0, tag), end
