"""Short calls without a detour: what would be the library's in any case is bound to the communicator as the library's own.

A method that only looks at a size and passes the call on costs half a microsecond, of some three that the library takes. So
where no size of a call is ours, the communicator's own attribute is mpi4py's method, which costs nothing; for the reductions it
is a function that knows its floors, with and without a compiled kernel. Attributes go when the handle is freed, by whomever:
then the methods say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiddl.collectives.arguments import FUSED
from mpiddl.tuning.rule import UNFUSED

SUM, MAX, MIN, PROD = MPI.SUM, MPI.MAX, MPI.MIN, MPI.PROD  # as attributes of a module they would cost 0.1 us a call

METHODS = {"Allreduce": "allreduce", "Reduce": "reduce", "Bcast": "bcast", "Allgather": "allgather",
           "Reduce_scatter_block": "reduce_scatter", "Barrier": "barrier", "Iallreduce": "iallreduce",
           "Ibcast": "ibcast"}  # fmt: skip
"""That are taken over, and what they are called in a table."""


def take(comm: MPI.Comm, taken_over: type, floors: Mapping[str, float]) -> None:
    """Bind what ``floors`` (bytes below which a call is the library's) leave to the library; a method that a program's own
    class, or the communicator itself, has in the place of that of ``taken_over`` stays."""
    bound: dict[str, Callable[..., Any]] = {}
    for name, call in METHODS.items():
        if name in vars(comm) or getattr(type(comm), name) is not getattr(taken_over, name):
            continue
        library = getattr(MPI.Comm, name).__get__(comm)
        if floors[call] == np.inf:
            bound[name] = library
        elif name in _SHORT and floors[call] > 0:
            method = getattr(taken_over, name).__get__(comm)
            bound[name] = _SHORT[name](library, method, floors[call], floors[UNFUSED[call]])
            bound[name].__doc__ = method.__doc__
    vars(comm).update(bound, _bound=bound)


def drop(comm: MPI.Comm) -> None:
    """Every call that `take` has bound is a method again."""
    for name, call in vars(comm).pop("_bound", {}).items():
        if vars(comm).get(name) is call:
            del vars(comm)[name]


def unfused(buffer: np.ndarray, op: Any) -> bool:
    """Whether it is plain at once that no compiled kernel reduces such arrays (`mpiddl.collectives.arguments.fused`).

    Another object for an operation, which some ranks may have, is looked at elsewhere."""
    return buffer.dtype.char not in FUSED if op is SUM else op is MAX or op is MIN or op is PROD


def _allreduce(library: Callable[..., None], method: Callable[..., None], floor: float, other: float) -> Callable[..., None]:
    """On one node all sums that have no kernel are the library's. There, the type is compared first, and no size is needed:
    each attribute of an array costs half a microsecond if caches are cold. Most arrays of a type share one dtype object. Arrays
    with another one, such as unpickled arrays, take the longer way, with the same result."""
    array, add, largest, least, product = np.ndarray, SUM, MAX, MIN, PROD
    float32, float64, int32, int64, complex64, complex128, int8 = map(np.dtype, "fdilFDb")

    def Allreduce(sendbuf: Any, recvbuf: Any, op: Any = add) -> None:
        if type(recvbuf) is array and ((n := recvbuf.nbytes) < floor or (n < other and unfused(recvbuf, op))):
            library(sendbuf, recvbuf, op)
        else:
            method(sendbuf, recvbuf, op)

    def one_node(sendbuf: Any, recvbuf: Any, op: Any = add) -> None:
        if op is add:
            try:
                kind = recvbuf.dtype
            except AttributeError:  # of a list, say
                kind = None
            if kind is float32 or kind is float64:
                if recvbuf.nbytes >= floor:
                    return method(sendbuf, recvbuf, op)
            elif not (kind is int32 or kind is int64 or kind is complex64 or kind is int8 or kind is complex128):
                return Allreduce(sendbuf, recvbuf, op)
        elif not (op is largest or op is least or op is product):
            return Allreduce(sendbuf, recvbuf, op)
        return library(sendbuf, recvbuf, op)

    return one_node if other == np.inf else Allreduce


def _reduce(library: Callable[..., None], method: Callable[..., None], floor: float, other: float) -> Callable[..., None]:
    array = np.ndarray

    def Reduce(sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0) -> None:
        if type(sendbuf) is array and ((n := sendbuf.nbytes) < floor or (n < other and unfused(sendbuf, op))):
            library(sendbuf, recvbuf, op, root)
        else:
            method(sendbuf, recvbuf, op, root)

    return Reduce


def _reduce_scatter_block(library: Callable[..., None], method: Callable[..., None], floor: float,
                          other: float) -> Callable[..., None]:
    array = np.ndarray

    def Reduce_scatter_block(sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        if type(sendbuf) is array and ((n := sendbuf.nbytes) < floor or (n < other and unfused(sendbuf, op))):
            library(sendbuf, recvbuf, op)
        else:
            method(sendbuf, recvbuf, op)

    return Reduce_scatter_block


_SHORT = {"Allreduce": _allreduce, "Reduce": _reduce, "Reduce_scatter_block": _reduce_scatter_block}
"""Makes of the library's method, ours and its floors (bytes) a function that knows which to call."""
