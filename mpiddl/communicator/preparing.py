"""When a communicator begins to use mpiddl's collectives, and when it ends.

Until then it counts the bytes of calls that might have been ours. All ranks must begin in the same call, so what is counted are
only things that MPI wants to be the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpiddl.collectives.arguments import check_alive
from mpiddl.communicator.private import ENOUGH_BYTES, NONBLOCKING, Private, keyval, private_of
from mpiddl.errors import CommError
from mpiddl.transport.base import REDUCED
from mpiddl.transport.comm import raise_held
from mpiddl.tuning import Forced
from mpiddl.tuning.rule import CANDIDATES

FLOOR = 16 << 10
"""Bytes below which nothing but the library is looked at, until `Preparing.Prepare` knows better: by the rule it always is."""

_ARRAY, _SUM, _FREE = np.ndarray, MPI.SUM, MPI.Comm.Free  # found once, and not in each call

# In fact a class beside one of mpi4py's; for the type checker it is one.
if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm as _Base
else:
    _Base = object

_FLOORS = dict.fromkeys(CANDIDATES, float(FLOOR)) | dict.fromkeys(NONBLOCKING, np.inf)
_NO_FLOORS = _FLOORS | dict.fromkeys(CANDIDATES, 0.0)


class Preparing(_Base):
    """A mixin for mpi4py's classes of intra-communicators."""

    _private: Private | None = None
    _choice: Any = None  # of algorithms: that of `_private`, unless the program has asked for some
    _floors: dict[str, float] = _FLOORS
    _table: Path | None = None
    _algorithms: Mapping[str, str] = MappingProxyType({})
    _nbytes, _enough = 0, float(ENOUGH_BYTES)  # of calls that might have been ours, and how many are enough to prepare
    _counted = 0  # of these, those of the call that is made now

    def Prepare(self) -> None:
        """Create the private duplicate and read the table now, and not at the first call that needs them. Collective.

        ``Communicator(comm)`` calls it. A communicator from ``Dup`` or ``Split`` calls it after blocking calls of 32 MiB in all
        (1 MiB if it comes from one on several nodes), or at the first call of which the program has set the algorithm. Until
        then all calls use the MPI library.
        """
        private = self._adopted()
        if private.link is None:
            raise_held(private.prepare(self, self._table))

    def Free(self) -> None:
        """Free the private duplicate, then the communicator; collective. COMM_WORLD and COMM_SELF stay: MPI raises."""
        try:
            if self._private is not None:
                self._give_back()
        finally:
            _FREE(self)

    def Disconnect(self) -> None:
        """As `Free`, once all pending communication is over; collective."""
        try:
            if self._private is not None:
                self._give_back()
        finally:
            MPI.Comm.Disconnect(self)

    def _early(self, library: Callable[..., None], buffer: Any, op: Any, *args: Any) -> bool:
        """A quick form of `_worth` for plain arrays: where a communicator is not prepared, and the call is the library's, it is
        made. It does not count if mpi4py refuses it."""
        if type(buffer) is not _ARRAY or op is not _SUM or self._floors is not _FLOORS or buffer.dtype.char not in REDUCED:
            return False
        nbytes = buffer.nbytes
        if nbytes < FLOOR:
            library(self, *args)
            return True
        nbytes += self._nbytes
        if nbytes >= self._enough or self.Get_attr(keyval()) is not None:
            return False
        library(self, *args)
        self._nbytes = nbytes
        return True

    def _worth(self, call: str, nbytes: int) -> bool:
        """Whether what is kept with the handle is prepared by now; a call that waits brings that about when it has been worth
        it: on all ranks in the same call, since each of them makes all calls."""
        private = self._found()
        if private is not None and private.link is not None:
            return True
        self._counted = nbytes if nbytes >= FLOOR else 0
        if self._count(self._counted) < (self._enough if private is None else private.enough) and call not in self._algorithms:
            return False
        private = self._adopted()
        private.prepare(self, self._table)
        return private.link is not None

    def _count(self, nbytes: int) -> float:
        """Add to the bytes of calls that might have been ours, and return them."""
        if self._private is None:
            self._nbytes += nbytes
            return self._nbytes
        self._private.nbytes += nbytes
        return self._private.nbytes

    def _found(self) -> Private | None:
        """What is kept with the handle, if there is anything. Local."""
        return self._adopted() if self._private is None and self.Get_attr(keyval()) is not None else self._private

    def _check(self) -> None:
        """Before anything is asked of a handle that may be gone: MPI libraries end the process then."""
        private = self._private
        if private is None:
            return
        if private.freed:
            raise CommError("comm: got a Communicator whose MPI handle was freed, expected a valid MPI handle")
        if private.link is not None and private.link.broken:
            check_alive(private.link)

    @property
    def _own(self) -> Private:
        assert self._private is not None
        return self._private

    def _floor(self, call: str) -> float:
        """Bytes below which a call that returns a request is the library's; it never prepares, but finds what is prepared."""
        self._found()
        return self._floors[call]

    def _forced(self, algorithms: Mapping[str, str]) -> None:
        """Take these algorithms, whatever the size: every call is looked at."""
        self._algorithms = algorithms
        if algorithms:
            self._floors = _NO_FLOORS

    def _adopted(self) -> Private:
        """What is kept with the handle, whatever object has prepared it; all objects on the handle count together from here
        on. Local."""
        if self._private is None:
            self._private = private = private_of(self)
            private.used_by(self)
            if private.link is None:
                private.nbytes += self._nbytes
                private.enough = min(private.enough, self._enough)
        return self._private

    def _start(self) -> None:
        """What is kept is prepared: calls may be ours."""
        self._choice = self._own.choice
        self._floors = self._own.floors
        if self._algorithms:
            self._choice = Forced(self._algorithms, self._choice)
            asked = {name: 1.0 for name, call in NONBLOCKING.items() if self._own.threads and call in self._algorithms}
            self._floors = self._floors | asked | dict.fromkeys(CANDIDATES, 0.0)

    def _stop(self) -> None:
        """The handle is freed. Each later call on this object checks that, and raises an error."""
        self._floors = _NO_FLOORS

    def _library(self, call: Callable[..., None], *args: Any) -> None:
        """What turned out not to be ours. A call that mpi4py refuses on this rank does not count: others do not make it."""
        try:
            call(self, *args)
        except BaseException:
            self._count(-self._counted)
            raise
        finally:
            self._counted = 0
            if self._private is not None and self._private.link is not None:
                raise_held(self._private.link)

    def _give_back(self) -> None:
        """Here, for out of the library's call for its attribute an exception would come as an error code."""
        if self in (MPI.COMM_WORLD, MPI.COMM_SELF):  # the library refuses to free these, so ours is needed on
            return
        try:
            self._adopted().close()
        finally:
            self._private, self._floors = None, _FLOORS
