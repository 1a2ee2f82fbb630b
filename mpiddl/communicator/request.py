"""Our collectives under way as requests of MPI's own kind, so that ``MPI.Request.Waitall`` takes them beside the library's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpiddl.collectives.base import Started
from mpiddl.collectives.progress import Progress


class Moving:
    """The thread that moves requests on, started with the first of them."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def on(self, part: _Part) -> None:
        self._progress = self._progress or Progress()
        self._progress.on(part)  # type: ignore[arg-type]

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()


class _Part:
    """A collective under way and the generalized request that stands for it, which is completed once."""

    def __init__(self, started: Started, buffers: Any, finish: Callable[[], None]):
        self._started, self._buffers, self._finish = started, buffers, finish
        self._lock, self._over = threading.Lock(), False
        self.request = MPI.Grequest.Start(_query)

    def Test(self) -> bool:
        """Go on as far as is possible without waiting."""
        if not self._over and self._started.Test():
            self.complete()
        return self._over

    def Wait(self) -> None:
        if not self._over:
            self._started.Wait()
            self.complete()

    def complete(self) -> None:
        with self._lock:
            if self._over:
                return
            self._finish()
            self._over, self._buffers = True, None
        self.request.Complete()


class CollectiveRequest(MPI.Request):
    """A request whose ``Wait`` and ``Test`` move the collective on themselves; in ``Waitall`` ... a thread does."""

    _part: _Part | None = None

    def Wait(self, status: Any = None) -> Any:
        if self._part is not None:
            self._part.Wait()
            self._part = None
        return MPI.Request.Wait(self, status)

    def Test(self, status: Any = None) -> bool:
        if self._part is not None and self._part.Test():
            self._part = None
        return MPI.Request.Test(self, status)

    def wait(self, status: Any = None) -> Any:
        self.Wait(status)

    def test(self, status: Any = None) -> tuple[bool, Any]:
        return self.Test(status), None


def moved(started: Started, moving: Moving, buffers: Any, finish: Callable[[], None]) -> CollectiveRequest:
    """A request for ``started``; ``finish`` is called once it is over, ``buffers`` are kept until then."""
    part = _Part(started, buffers, finish)
    request = CollectiveRequest.__new__(CollectiveRequest, part.request)
    request._part = part
    moving.on(part)
    return request


def _query(status: Any, *args: Any, **options: Any) -> None:
    """MPI asks for a status: that of an empty message, as the library's own collectives have."""
    status.Set_source(MPI.ANY_SOURCE)
    status.Set_tag(MPI.ANY_TAG)
    status.Set_elements(MPI.BYTE, 0)
    status.Set_cancelled(False)
