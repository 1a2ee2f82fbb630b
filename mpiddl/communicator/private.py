"""What mpiddl keeps with a handle of the user's: a communicator of its own on the same ranks, and who chooses algorithms."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
from mpi4py import MPI

from mpiddl.collectives import Started
from mpiddl.collectives.allreduce_staged import stage
from mpiddl.collectives.at_once import AtOnce
from mpiddl.collectives.calls import READ
from mpiddl.collectives.progress import Progress
from mpiddl.collectives.reading import Reading, reading
from mpiddl.communicator import shortcuts
from mpiddl.transport.agree import agreed
from mpiddl.transport.base import SUM, raise_held
from mpiddl.transport.mpi import MpiComm
from mpiddl.tuning import chooser
from mpiddl.tuning.place import table_path
from mpiddl.tuning.rule import CANDIDATES


class Private:
    """Kept as an attribute of the handle, so that it goes with it, whoever frees it.

    ``floors``: for each call the bytes below which it is the library's.
    """

    def __init__(self, link: MpiComm, choice: Any):
        self.link, self.choice = link, choice
        self.threads = False  # whether every rank has one that may move requests on
        self._progress: Progress | None = None
        self._users: list[ref[Any]] = []
        self._at_once: dict[tuple[str, str], AtOnce | None] = {}
        self.floors = {call: choice.floor(call) for call in CANDIDATES}

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

    def used_by(self, handle: Any, taken_over: type, floors: Mapping[str, float]) -> None:
        """One more object has this handle; its calls, if methods of ``taken_over``, go the shortest way until it is freed."""
        shortcuts.take(handle, taken_over, floors)
        self._users = [user for user in self._users if user() is not None] + [ref(handle)]

    def look_after(self) -> None:
        """Have a thread move on what is under way, while the program computes or waits in the library."""
        self._progress = self._progress or Progress(self.link)
        self._progress.wake()

    def close(self) -> None:
        """Collective. Requests keep their errors for their own ``Wait``; a signal's exception comes when all is freed."""
        if self.link.freed:
            return
        self.floors.update(dict.fromkeys(self.floors, 0.0))  # whoever still has the handle then takes a closer look
        for user in self._users:
            if (handle := user()) is not None:
                shortcuts.drop(handle)
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


def private_of(comm: Any, table: Path | None) -> Private:
    """What is kept with ``comm``, made if there is none; its ``link`` may hold back an exception of a signal's handler.

    Communication
    -------------
    Collective: at the first time a duplication, a barrier, four splits, three broadcasts and two all-gathers; one all-gather
    more where a table that is there, or was asked for, is not used.
    """
    found = comm.Get_attr(keyval())
    if found is None:
        link = MpiComm(MPI.Intracomm(comm).Dup(), ends_jobs=False)
        asked_for = table is not None or bool(os.environ.get("MPIDDL_TUNE"))
        found = Private(link, chooser(link, table or table_path(os.environ), asked_for))
        found.threads = all(link.allgather(MPI.Query_thread() == MPI.THREAD_MULTIPLE))
        comm.Set_attr(keyval(), found)
        if found.choice.unused:
            with agreed(link):  # warnings may be errors
                if link.rank == 0:
                    warnings.warn(f"mpiddl: {found.choice.source}", stacklevel=5)
    return found
