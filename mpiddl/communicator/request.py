"""Our collectives under way as requests of MPI's own kind, so that ``MPI.Request.Waitall`` takes them beside the library's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpiddl.collectives.base import Started


class CollectiveRequest(MPI.Request):
    """A request whose ``Wait`` and ``Test`` move the collective on themselves; in ``Waitall`` ... a thread does."""

    _started: Started | None = None

    def Wait(self, status: Any = None) -> Any:
        if self._started is not None:
            started, self._started = self._started, None
            started.Wait()
        return MPI.Request.Wait(self, status)

    def Test(self, status: Any = None) -> bool:
        if self._started is not None and self._started.Test():
            self._started = None
        return MPI.Request.Test(self, status)

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
    stands_for = MPI.Grequest.Start(_query)
    request = CollectiveRequest.__new__(CollectiveRequest, stands_for)
    request._started = started
    kept = [buffers]

    def complete() -> None:
        if started.failure is None:
            finish()
        kept.clear()
        stands_for.Complete()

    started.then(complete)
    return request


def _query(status: Any, *args: Any, **options: Any) -> None:
    """MPI asks for a status: that of an empty message, as the library's own collectives have."""
    status.Set_source(MPI.ANY_SOURCE)
    status.Set_tag(MPI.ANY_TAG)
    status.Set_elements(MPI.BYTE, 0)
    status.Set_cancelled(False)
