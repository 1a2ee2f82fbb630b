"""Communicators with faster collectives, one class for each of mpi4py's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from mpi4py import MPI

from mpiddl.communicator.faster import Faster
from mpiddl.communicator.private import ENOUGH_BYTES, Private, keyval
from mpiddl.errors import UsageError
from mpiddl.transport.mpi import MpiComm
from mpiddl.transport.uncaught import public
from mpiddl.tuning import Forced, check_algorithms
from mpiddl.tuning.rule import CANDIDATES, READ

_DUP, _SPLIT = MPI.Comm.Dup, MPI.Comm.Split  # found once, and not in each call
_NEW: Any = MPI.Intracomm.__new__


class _Making(Faster):
    """Methods that create communicators return communicators of this class."""

    def Split(self, color: int = 0, key: int = 0) -> Communicator:
        return self._marked(_NEW(Communicator, _SPLIT(self, color, key)))

    def Split_type(self, split_type: int, key: int = 0, info: Any = MPI.INFO_NULL) -> Communicator:
        return self._like(MPI.Comm.Split_type(self, split_type, key, info))

    def Create(self, group: Any) -> Communicator:
        return self._like(MPI.Comm.Create(self, group))

    def Dup(self, info: Any = None) -> Communicator:
        return self._marked(_DUP(self, info))

    def Clone(self) -> Communicator:
        return self._marked(MPI.Comm.Clone(self))

    def Dup_with_info(self, info: Any) -> Communicator:
        return self._marked(MPI.Comm.Dup_with_info(self, info))

    def Idup(self, info: Any = None) -> tuple[Communicator, MPI.Request]:
        made, request = MPI.Comm.Idup(self, info)
        return self._marked(made), request

    def Idup_with_info(self, info: Any) -> tuple[Communicator, MPI.Request]:
        made, request = MPI.Comm.Idup_with_info(self, info)
        return self._marked(made), request

    def Create_group(self, group: Any, tag: int = 0) -> Communicator:
        return self._like(MPI.Intracomm.Create_group(self, group, tag))

    def Create_cart(self, *args: Any, **options: Any) -> CartCommunicator:
        return self._like(MPI.Intracomm.Create_cart(self, *args, **options), CartCommunicator)

    def Create_graph(self, *args: Any, **options: Any) -> GraphCommunicator:
        return self._like(MPI.Intracomm.Create_graph(self, *args, **options), GraphCommunicator)

    def Create_dist_graph(self, *args: Any, **options: Any) -> DistGraphCommunicator:
        return self._like(MPI.Intracomm.Create_dist_graph(self, *args, **options), DistGraphCommunicator)

    def Create_dist_graph_adjacent(self, *args: Any, **options: Any) -> DistGraphCommunicator:
        return self._like(MPI.Intracomm.Create_dist_graph_adjacent(self, *args, **options), DistGraphCommunicator)

    def __reduce__(self) -> Any:
        """As mpi4py: only what is known by name can be pickled. Nothing is prepared when it is read."""
        for name in ("COMM_WORLD", "COMM_SELF"):
            if getattr(MPI, name) is self:  # a program may have put ours in the place of MPI's
                return _named, (name,)
        _, arguments = cast(tuple[Any, tuple[Any, ...]], MPI.Comm.__reduce__(self))
        return _unpickled, (type(self), arguments[-1], self._table, dict(self._algorithms))

    if not TYPE_CHECKING:  # for which it is an attribute

        @property
        def handle(self) -> int:
            """The MPI handle. Another object may be made on it: it does what this one does, and their calls count together."""
            return self._shared(MPI.Comm.handle.__get__(self))

    def py2f(self) -> int:
        return self._shared(MPI.Comm.py2f(self))

    def toint(self) -> int:
        return self._shared(MPI.Comm.toint(self))

    def _shared(self, number: int) -> int:
        if self == MPI.COMM_NULL or MPI.Is_finalized():
            return number
        with suppress(MPI.Exception):  # freed by another object
            private = self._adopted()
            private.table, private.algorithms = self._table, self._algorithms
        return number

    @classmethod
    def f2py(cls, arg: int) -> Any:
        return _ours(MPI.Comm.f2py(arg))

    @classmethod
    def fromint(cls, arg: int) -> Any:
        return _ours(MPI.Comm.fromint(arg))

    @classmethod
    def fromhandle(cls, handle: int) -> Any:
        return _ours(MPI.Comm.fromhandle(handle))

    def _like(self, comm: MPI.Comm, kind: Any = None) -> Any:
        """A communicator made from this one, as one of ours."""
        return self._marked((kind or Communicator).__new__(kind or Communicator, comm))

    def _marked(self, made: Any) -> Any:
        """With what it inherits."""
        private = self._private or self._found()
        enough = self._enough if private is None else private.enough
        if self._table is not None:
            made._table = self._table
        if self._algorithms:
            made._forced(self._algorithms)
        if enough != ENOUGH_BYTES:
            made._enough = enough
        return made


class _Called(type):
    """``Communicator(comm, table, algorithms)``: ``__new__`` takes the first argument only. A ``__new__`` of ours would cost
    each ``Dup`` a microsecond, because mpi4py calls it."""

    def __call__(cls: Any, *args: Any, **options: Any) -> Any:
        if cls.__new__ is not _NEW:  # of a program's own class
            return super().__call__(*args, **options)
        made: Any = _NEW(cls, *args[:1], **({"comm": options["comm"]} if "comm" in options else {}))
        made.__init__(*args, **options)
        return made


class Communicator(_Making, MPI.Intracomm, metaclass=_Called):
    """An ``MPI.Intracomm`` with faster collectives for buffers. See docs/communicator.md.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The communicator. Both objects share its MPI handle: ``Free`` of one frees the other. Without it, or with COMM_NULL, the
        result is a null communicator, as from ``MPI.Intracomm()``.
    table : path, optional
        Table of ``mpiddl tune``. The default is the file that MPIDDL_TUNE names, or ~/.config/mpiddl/tune.toml.
    algorithms : dict of str to str, optional
        The algorithm of a call, whatever the size of the message: ``{"allreduce": "ring", "bcast": "library"}``. The same on
        all ranks. Calls without an entry use the table or the rule. Communicators made from this one inherit it, and objects on
        the same handle.

    Raises
    ------
    TypeError
        ``comm`` is not an intra-communicator.
    UsageError
        ``algorithms`` names a call or an algorithm that does not exist.

    Communication
    -------------
    The constructor is collective over ``comm``: a duplication, a barrier, four splits, three broadcasts and two all-gathers,
    and one more all-gather if there is a table that is not used. On one rank it does not communicate.
    """

    @public
    def __init__(self, comm: MPI.Comm | None = None, table: str | Path | None = None,
                 algorithms: Mapping[str, str] | None = None):
        given = comm if isinstance(comm, Faster) else self
        self._table = Path(table) if table is not None else given._table
        self._forced(check_algorithms(algorithms) if algorithms is not None else given._algorithms)
        if self != MPI.COMM_NULL and self.Get_size() > 1:
            if isinstance(comm, Faster):
                comm._adopted()  # whichever of the two a rank uses
            self.Prepare()
            if READ in self._algorithms.values() and not self._own.choice.reads:
                raise UsageError(f"algorithms: got {READ!r}, but the ranks cannot read each other's memory here; expected "
                                 "other algorithms, or 'library'")

    @classmethod
    def Create_from_group(cls, *args: Any, **options: Any) -> Any:
        return cls.__new__(cls, MPI.Intracomm.Create_from_group(*args, **options))


class CartCommunicator(_Making, MPI.Cartcomm):
    """A `Communicator` with a Cartesian topology."""

    def Sub(self, remain_dims: Any) -> Any:
        return self._like(MPI.Cartcomm.Sub(self, remain_dims), CartCommunicator)


class GraphCommunicator(_Making, MPI.Graphcomm):
    """A `Communicator` with a graph topology."""


class DistGraphCommunicator(_Making, MPI.Distgraphcomm):
    """A `Communicator` with a distributed graph topology."""


_KINDS: dict[type[MPI.Comm], Any] = {MPI.Intracomm: Communicator, MPI.Cartcomm: CartCommunicator,
                                     MPI.Graphcomm: GraphCommunicator, MPI.Distgraphcomm: DistGraphCommunicator}


def _ours(comm: MPI.Comm) -> Any:
    """An intra-communicator of the library's as one of ours. Local: ranks need not do this together."""
    kind = _KINDS.get(type(comm))
    return comm if kind is None else _unpickled(kind, comm)


def _unpickled(kind: Any, comm: MPI.Comm, table: Path | None = None,
               algorithms: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Another object on a handle: it has what is kept there. If nothing is, it does not begin to use our algorithms by itself,
    for other ranks need not have it."""
    made = kind.__new__(kind, comm)
    made._enough = inf
    found = made.Get_attr(keyval()) if made != MPI.COMM_NULL else None
    made._table = table or (found and found.table)
    made._forced(algorithms or (found.algorithms if found else {}))
    if found is not None:
        made._adopted()
    return made


def _named(name: str) -> Any:
    return getattr(MPI, name)


def always(link: MpiComm, algorithm: str) -> Communicator:
    """A communicator on ``link``, one of ours, that takes one algorithm whatever the size: for measuring. Local."""
    made = Communicator.__new__(Communicator, link.raw)
    made._private = Private()
    made._private.use(link, Forced(dict.fromkeys(CANDIDATES, algorithm)))
    made._choice, made._floors = made._private.choice, made._private.floors
    return made
