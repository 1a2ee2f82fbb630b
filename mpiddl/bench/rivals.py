"""The MPI library's own collectives in other settings than its defaults: a communicator for each, all in one job.

A library's default may be a poor choice for a machine. Open MPI chooses its components when a communicator is created: an info
key names those to use, and the algorithm of the component ``tuned`` is a variable of MPI's tool interface (MPI_T). So all
settings are measured in turns, on the same arrays. Other libraries have no settings here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpiddl.node.topology import neighbours
from mpiddl.transport.mpi import MpiComm
from mpiddl.transport.start import load_mpi

PREFERENCE = "ompi_comm_coll_preference"
"""Info key of Open MPI 5: the components that a new communicator uses, or, after ``^``, does not."""

NAME_BYTES = 256


@contextmanager
def rivals(link: MpiComm, call: str) -> Iterator[dict[str, Any]]:
    """mpi4py communicators on the ranks of ``link``, by setting; none if the library is not Open MPI.

    Parameters
    ----------
    link : MpiComm
    call : str
        MPI's name of the collective: ``allreduce``, ``allgatherv``, ``reduce_scatter_block``.

    Communication
    -------------
    Collective over ``link``: a duplication for each setting.
    """
    made: dict[str, Any] = {}
    try:
        if link.size > 1 and link.library().startswith("Open MPI"):
            made["^han"] = _preferring(link, "^han")
            if len(neighbours(link).topology.nodes) == 1:
                made["sm"] = _preferring(link, "sm")
            made |= _tuned(link, call)
        yield made
    finally:
        for comm in made.values():
            comm.Free()


def _preferring(link: MpiComm, components: str) -> Any:
    info = load_mpi().Info.Create()
    info.Set(PREFERENCE, components)
    made = link.raw.Dup_with_info(info)
    info.Free()
    return made


def _tuned(link: MpiComm, call: str) -> dict[str, Any]:
    """One for each algorithm of ``tuned``, which reads the variable when a communicator is created."""
    made: dict[str, Any] = {}
    tools = _Tools()
    rules, chosen = tools.variable("coll_tuned_use_dynamic_rules"), tools.variable(f"coll_tuned_{call}_algorithm")
    if rules is None or chosen is None:
        return made
    rules.write(1)
    try:
        for name, value in chosen.values().items():
            if value and ("two_proc" not in name or link.size == 2) and chosen.write(value):
                made[f"tuned {name}"] = _preferring(link, "^han")
    finally:
        chosen.write(0)
        rules.write(0)
    return made


class _Tools:
    """The part of MPI's tool interface that reads and writes control variables; mpi4py has none of it."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(_file())
        level = load_mpi().Query_thread()  # in Open MPI it is the level of all calls from then on
        self.library.MPI_T_init_thread(level, ctypes.byref(ctypes.c_int()))

    def variable(self, name: str) -> _Variable | None:
        """A control variable, if there is one of this name."""
        index = ctypes.c_int()
        if self.library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)):
            return None
        return _Variable(self.library, index)


class _Variable:
    """A control variable with the values of an enumeration, or a truth value."""

    def __init__(self, library: Any, index: ctypes.c_int):
        self._library, self._index, self._handle = library, index, ctypes.c_void_p()
        library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(self._handle), ctypes.byref(ctypes.c_int()))

    def write(self, value: int) -> bool:
        """Set it; returns whether the library takes this value."""
        return not self._library.MPI_T_cvar_write(self._handle, ctypes.byref(ctypes.c_int(value)))

    def values(self) -> dict[str, int]:
        """The names of its values."""
        kind, name, found = ctypes.c_void_p(), ctypes.create_string_buffer(NAME_BYTES), {}
        count, value, nothing = ctypes.c_int(), ctypes.c_int(), ctypes.c_int
        self._library.MPI_T_cvar_get_info(self._index, None, ctypes.byref(nothing()), ctypes.byref(nothing()),
                                          ctypes.byref(nothing()), ctypes.byref(kind), None, ctypes.byref(nothing()),
                                          ctypes.byref(nothing()), ctypes.byref(nothing()))
        self._library.MPI_T_enum_get_info(kind, ctypes.byref(count), None, ctypes.byref(nothing()))
        for item in range(count.value):
            self._library.MPI_T_enum_get_item(kind, item, ctypes.byref(value), name, ctypes.byref(nothing(NAME_BYTES)))
            found[name.value.decode()] = value.value
        return found


def _file() -> str:
    """The library that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split(maxsplit=5)[-1] for line in lines if Path(line.split()[-1]).name.startswith("libmpi.so"))
