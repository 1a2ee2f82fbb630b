"""Our collectives under way as requests of MPI's own kind, so that ``MPI.Request.Waitall`` takes them beside the library's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpiddl.collectives.base import Started


class Job:
    """A collective, and what went wrong with what was to be done when it was over."""

    def __init__(self, started: Started):
        self.started = started
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
    stands_for = MPI.Grequest.Start(_query, None, None, (job,))
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
            stands_for.Complete()

    started.then(complete)
    return request


def _query(status: Any, job: Job) -> None:
    """MPI asks for a status: that of an empty message, as the library's own collectives have."""
    job.check()
    status.Set_source(MPI.ANY_SOURCE)
    status.Set_tag(MPI.ANY_TAG)
    status.Set_elements(MPI.BYTE, 0)
    status.Set_cancelled(False)
