"""What mpiddl keeps with a handle of the user's: a communicator of its own on the same ranks, and who chooses algorithms."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import ref

import numpy as np
from mpi4py import MPI

from mpiddl.collectives import Started
from mpiddl.collectives.allreduce_staged import stage
from mpiddl.collectives.at_once import AtOnce
from mpiddl.collectives.reading import Reading, reading
from mpiddl.errors import OutputError, SharedMemoryError
from mpiddl.node.topology import neighbours
from mpiddl.progress.thread import Progress
from mpiddl.transport.agree import agreed
from mpiddl.transport.base import SUM
from mpiddl.transport.comm import raise_held
from mpiddl.transport.mpi import MpiComm
from mpiddl.tuning import chooser
from mpiddl.tuning.rule import CANDIDATES, READ, UNFUSED, nonblocking_bytes

NONBLOCKING = {"iallreduce": "allreduce", "ibcast": "bcast"}
"""Calls that return a request, and what they are called in a table."""

ENOUGH_BYTES = 32 << 20
"""Of calls on a communicator that was made from another one, until it is prepared. On one node this costs 1 to 3 ms, and so
many bytes take 5 to 10 ms, of which our algorithms spare a quarter."""

ENOUGH_BYTES_ACROSS = 1 << 20
"""The same for those made from one on several nodes: over TCP, a call or two take as long as preparing."""


CANNOT_BE_HAD = SharedMemoryError, OutputError
"""Raised on all ranks, before an algorithm begins, where what it needs cannot be made: no room in shared memory, no folder
for compiled kernels."""


class Private:
    """What mpiddl keeps as an attribute of an MPI handle. It is freed with the handle, and all objects on the handle share it.

    link : until `prepare`, None: all calls are the library's.
    nbytes, enough : of calls that might have been ours, and how many are enough to prepare; once prepared, how many are enough
        for a communicator that is made from this one.
    table, algorithms : what the object was given of which a program has asked the number; others on the handle take them over.
    floors : for each call the bytes below which it is the library's.
    refused : calls and sizes for which there is no shared memory, and why.
    """

    link: Any = None
    choice: Any = None
    threads = False  # whether every rank has one that may move requests on
    freed = False
    nbytes = 0
    enough = inf
    table: Path | None = None
    algorithms: Mapping[str, str] = MappingProxyType({})
    _progress: Progress | None = None

    def __init__(self) -> None:
        self.refused: dict[tuple[str, int], str] = {}
        self._users: list[ref[Any]] = []
        self._at_once: dict[tuple[str, str], AtOnce | None] = {}

    def prepare(self, comm: MPI.Comm, table: Path | None) -> MpiComm:
        """Have a communicator of our own, and return it; it may hold back an exception of a signal's handler.

        Communication
        -------------
        Collective: a duplication, a barrier, four splits, three broadcasts and two all-gathers; one all-gather more where a
        table that is there, or was asked for, is not used.
        """
        link = MpiComm.owning(MPI.Intracomm(comm).Dup(), ends_jobs=False)
        choice = chooser(link, os.environ, table)
        self.threads = all(link.setup_allgather(MPI.Query_thread() == MPI.THREAD_MULTIPLE))
        self.enough = ENOUGH_BYTES if len(choice.topology.nodes) == 1 else ENOUGH_BYTES_ACROSS
        self.use(link, choice)
        if choice.unused:
            self._warn(choice.source)
        return link

    def use(self, link: MpiComm, choice: Any) -> None:
        """Calls of all objects on the handle are ours from here on, where ``choice`` says so."""
        self.link, self.choice = link, choice
        least = nonblocking_bytes(neighbours(link).topology, link.library()) if self.threads else inf
        own = {call: choice.floor(call) for call in CANDIDATES}
        own |= {call: min(own[call], own[name]) for call, name in UNFUSED.items()}
        self.floors = own | {name: max(least, own[call]) for name, call in NONBLOCKING.items()}
        for user in self._users:
            if (handle := user()) is not None:
                handle._start()

    def at_once(self, algorithm: str, dtype: np.dtype) -> AtOnce | None:
        """What sums arrays of one node in one call of a kernel, if that is how ``algorithm`` all-reduces them and nothing else
        is under way; collective at the first time for each dtype."""
        found = self._made(READ, reading, dtype) if algorithm == READ else None
        if found is None and algorithm in (READ, "two-step"):
            found = self._made("two-step", stage, dtype)
        return None if self.link.started or self.link.held else found

    def reading(self, algorithm: str, dtype: np.dtype) -> Reading | None:
        """What reads others' memory, if that is what ``algorithm`` does; else as `at_once`."""
        found = self._made(READ, reading, dtype) if algorithm == READ else None
        return None if self.link.started or self.link.held else found

    def _made(self, name: str, make: Callable[..., Any], dtype: np.dtype) -> Any:
        if (name, dtype.char) not in self._at_once:
            self._at_once[name, dtype.char] = make(self.link, dtype, SUM)
        return self._at_once[name, dtype.char]

    def used_by(self, handle: Any) -> None:
        """One more object has this handle."""
        self._users = [user for user in self._users if user() is not None] + [ref(handle)]
        if self.link is not None:
            handle._start()

    def refuse(self, call: str, nbytes: int, error: BaseException) -> bool:
        """Whether ``error`` says, on all ranks, that such calls cannot be ours; they are the library's then. Collective."""
        why = error if isinstance(error, CANNOT_BE_HAD) else error.__cause__
        if not isinstance(why, CANNOT_BE_HAD):
            return False
        if why is not error:  # of a signal's handler: it comes when the library has done the call
            self.link.held = error
        self.refused[call, nbytes.bit_length()] = str(why)
        if len(self.refused) == 1:
            self._warn(f"{call} of {nbytes} bytes: {why}; the MPI library's algorithm is used instead")
        return True

    def _warn(self, words: str) -> None:
        with agreed(self.link):  # warnings may be errors
            if self.link.rank == 0:
                warnings.warn(f"mpiddl: {words}", stacklevel=6)

    def look_after(self) -> None:
        """Have a thread move on what is under way, while the program computes or waits in the library."""
        self._progress = self._progress or Progress(self.link)
        self._progress.begin()

    def close(self) -> None:
        """Collective. Requests keep their errors for their own ``Wait``; a signal's exception comes when all is freed."""
        if self.freed:
            return
        self.freed = True
        for user in self._users:
            if (handle := user()) is not None:
                handle._stop()
        if self.link is None:
            return
        try:
            for started in [started for started in self.link.started if started.of is self.link]:
                self._end(started)
        finally:
            if self._progress is not None:
                self._progress.Free()
            self.link.Free()
        raise_held(self.link)

    def _end(self, started: Started) -> None:
        """MPI, too, lets what is under way come to its end."""
        try:
            started.Wait()
        except BaseException as error:
            if error is not started.failure:
                self.link.held = self.link.held or error


@cache
def keyval() -> int:
    """Of the attribute; it is not copied to duplicates."""
    return MPI.Comm.Create_keyval(delete_fn=lambda comm, key, private: private.close())


def private_of(comm: MPI.Comm) -> Private:
    """What is kept with ``comm``, made if there is none. Local."""
    found: Any = comm.Get_attr(keyval())
    if found is None:
        found = Private()
        comm.Set_attr(keyval(), found)
    return found
