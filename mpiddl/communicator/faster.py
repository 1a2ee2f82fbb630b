"""The calls that are taken over, for any class of intra-communicators.

All ranks must decide alike, so what is looked at are only things that MPI wants to be the same on all of them: the call,
the operation, the bytes of the message. How a message lies in memory may differ between ranks; where it has gaps it is
packed. Short messages are the library's after one comparison, or none (`shortcuts`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import index
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiddl.collectives import Started, calls
from mpiddl.collectives.arguments import fused
from mpiddl.communicator import shortcuts
from mpiddl.communicator.preparing import Preparing
from mpiddl.communicator.request import request_of
from mpiddl.transport.base import IN_PLACE, MAX, MIN, PROD, SUM, Op
from mpiddl.transport.buffers import Memory, largest, numbers, payload
from mpiddl.transport.mpi import MpiComm
from mpiddl.tuning import Choice
from mpiddl.tuning.rule import CANDIDATES, LIBRARY, UNFUSED

Reduction = tuple[tuple[MpiComm, str], Any, Memory, Op]
"""Communicator and algorithm, what is reduced (or IN_PLACE), where to, and how."""

_ARRAY, _ALLREDUCE = np.ndarray, MPI.Comm.Allreduce  # found once, and not in each call

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)  # the same objects for all arrays of these types

_OPS = (MPI.SUM, SUM), (MPI.MAX, MAX), (MPI.MIN, MIN), (MPI.PROD, PROD)


class Faster(Preparing):
    """The collectives that mpiddl replaces, as a mixin for mpi4py's classes of intra-communicators."""

    def why(self, call: str, nbytes: int, dtype: Any = np.float32, op: Any = MPI.SUM) -> Choice:
        """The algorithm for a call, and the reason: ``print(comm.why("allreduce", 1 << 20))``. Local after `Prepare`.

        Parameters
        ----------
        call : str
            allreduce, reduce, bcast, allgather, reduce_scatter or barrier.
        nbytes : int
            Size of the array that is reduced, broadcast or, in total, received.
        dtype, op
            Of a reduction.
        """
        if call not in CANDIDATES:
            raise ValueError(f"call: got {call!r}, expected one of {', '.join(CANDIDATES)}")
        if nbytes < 0:
            raise ValueError(f"nbytes: got {nbytes}, expected a message size in bytes, 0 or more")
        if self._private is None or self._private.link is None:
            return Choice(LIBRARY, "not prepared yet; call Prepare()")
        if refused := self._private.refused.get((call, nbytes.bit_length())):
            return Choice(LIBRARY, refused)
        known = _op(op)
        is_fused = known is not None and fused(np.dtype(dtype), known)
        return self._choice.choose(call if is_fused else UNFUSED.get(call, call), nbytes)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        if self._private is None and self._early(_ALLREDUCE, recvbuf, op, sendbuf, recvbuf, op):
            return
        if largest(recvbuf) < self._floors["allreduce"]:
            _ALLREDUCE(self, sendbuf, recvbuf, op)
        elif not self._allreduce(sendbuf, recvbuf, op):
            self._library(MPI.Comm.Allreduce, sendbuf, recvbuf, op)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0) -> None:
        mine = recvbuf if sendbuf is MPI.IN_PLACE else sendbuf
        if largest(mine) < self._floors["reduce"]:
            MPI.Comm.Reduce(self, sendbuf, recvbuf, op, root)
        elif self._private is None and self._early(MPI.Comm.Reduce, mine, op, sendbuf, recvbuf, op, root):
            return
        elif not self._reduce(sendbuf, recvbuf, op, root):
            self._library(MPI.Comm.Reduce, sendbuf, recvbuf, op, root)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        if largest(buf) < self._floors["bcast"]:
            MPI.Comm.Bcast(self, buf, root)
        elif self._private is None and self._early(MPI.Comm.Bcast, buf, MPI.SUM, buf, root):
            return
        elif not self._bcast(buf, root):
            self._library(MPI.Comm.Bcast, buf, root)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        if largest(recvbuf) < self._floors["allgather"]:
            MPI.Comm.Allgather(self, sendbuf, recvbuf)
        elif self._private is None and self._early(MPI.Comm.Allgather, recvbuf, MPI.SUM, sendbuf, recvbuf):
            return
        elif not self._allgather(sendbuf, recvbuf):
            self._library(MPI.Comm.Allgather, sendbuf, recvbuf)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        mine = recvbuf if sendbuf is MPI.IN_PLACE else sendbuf
        if largest(mine) < self._floors["reduce_scatter"]:
            MPI.Comm.Reduce_scatter_block(self, sendbuf, recvbuf, op)
        elif self._private is None and self._early(MPI.Comm.Reduce_scatter_block, mine, op, sendbuf, recvbuf, op):
            return
        elif not self._reduce_scatter(sendbuf, recvbuf, op):
            self._library(MPI.Comm.Reduce_scatter_block, sendbuf, recvbuf, op)

    def Barrier(self) -> None:
        way = None
        if self._floors["barrier"] <= 0:
            self._check()
            way = self._way("barrier", 0)
        if way is None:
            MPI.Comm.Barrier(self)
        else:
            calls.barrier(way[0])

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> MPI.Request:
        self._check()
        least = self._floor("iallreduce")
        found = self._reduction(sendbuf, recvbuf, op, least) if largest(recvbuf) >= least else None
        if found is None:
            return MPI.Comm.Iallreduce(self, sendbuf, recvbuf, op)
        (link, algorithm), source, result, known = found
        start = partial(calls.iallreduce, link, source, result.array, known, algorithm=algorithm)
        try:
            return self._moved(start, (sendbuf, recvbuf), result)
        except BaseException as error:
            if not self._own.refuse("allreduce", result.array.nbytes, error):
                raise
        return MPI.Comm.Iallreduce(self, sendbuf, recvbuf, op)

    def Ibcast(self, buf: Any, root: int = 0) -> MPI.Request:
        self._check()
        least = self._floor("ibcast")
        found = self._data(buf, root, least) if largest(buf) >= least else None
        if found is None:
            return MPI.Comm.Ibcast(self, buf, root)
        (link, algorithm), data, rank = found
        return self._moved(partial(calls.ibroadcast, link, data.array, rank, algorithm=algorithm), buf, data)

    def _allreduce(self, sendbuf: Any, recvbuf: Any, op: Any) -> bool:
        """Whether it was done our way; so are the next ones. What is not understood is mpi4py's, with its errors."""
        self._check()
        plain = _plain(sendbuf, recvbuf) if op is MPI.SUM and self._choice is not None else None
        if plain is not None and (done := self._at_once(*plain)) is not None:
            return done
        found = self._reduction(sendbuf, recvbuf, op)
        if found is None:
            return False
        (link, algorithm), source, result, known = found
        try:
            at_once = self._own.at_once(algorithm, result.array.dtype) if known is SUM else None
            if at_once is not None and result.array.size:
                at_once.run(at_once.allreduce(result.array if source is IN_PLACE else source, result.array))
            else:
                calls.allreduce(link, source, result.array, known, algorithm=algorithm)
        except BaseException as error:
            if self._own.refuse("allreduce", result.array.nbytes, error):
                return False
            raise
        finally:  # an exception of a signal's handler comes when all is done
            result.put_back()
        return True

    def _at_once(self, source: np.ndarray, result: np.ndarray) -> bool | None:
        """Whether a kernel has done it; None where that takes a closer look."""
        own = self._own
        if own.refused:
            return None
        try:
            at_once = own.at_once(self._choice.algorithm("allreduce", result.nbytes), result.dtype)
            if at_once is None:
                return None
            at_once.run(at_once.allreduce(source, result))
        except BaseException as error:
            if own.refuse("allreduce", result.nbytes, error):
                return False
            raise
        return True

    def _reduction(self, sendbuf: Any, recvbuf: Any, op: Any, least: float = 0) -> Reduction | None:
        """What an all-reduce takes, if it is one for us."""
        known = _op(op)
        result = numbers(recvbuf) if known is not None else None
        if result is not None and result.array.nbytes < least:  # the message; the buffer around it may be longer on some ranks
            return None
        way = self._way("allreduce", result.array.nbytes, result.array.dtype, known) if result is not None else None
        if known is None or result is None or way is None:
            return None
        source = result if sendbuf is MPI.IN_PLACE else numbers(sendbuf)
        if source is None or not _fits(source.array.dtype, source.array.size, result, known) or _overlap(source, result):
            return None
        return way, IN_PLACE if source is result else source.array, result, known

    def _reduce(self, sendbuf: Any, recvbuf: Any, op: Any, root: int) -> bool:
        mine = recvbuf if sendbuf is MPI.IN_PLACE else sendbuf
        self._check()
        known, source = _op(op), numbers(mine)
        way = self._way("reduce", source.array.nbytes, source.array.dtype, known) if source is not None else None
        rank = _rank(root, way[0]) if way is not None else None
        if way is None or known is None or source is None or rank is None:
            return False
        link, algorithm = way
        if link.rank != rank:
            ours = sendbuf is not MPI.IN_PLACE and _ordered(source.array.dtype, known)
            return ours and self._reduce_by(algorithm, source.array, None, known, rank)
        result = source if sendbuf is MPI.IN_PLACE else numbers(recvbuf)
        if result is None or not _fits(source.array.dtype, source.array.size, result, known):
            return False
        if _overlap(source, result):  # which only the root can see: the others are at it
            source = Memory(source.array.copy())
        try:
            return self._reduce_by(algorithm, IN_PLACE if source is result else source.array, result.array, known, rank)
        finally:
            result.put_back()

    def _reduce_by(self, algorithm: str, source: Any, result: Any, op: Op, root: int) -> bool:
        given: np.ndarray = result if source is IN_PLACE else source
        try:
            at_once = self._own.reading(algorithm, given.dtype) if op is SUM and given.size else None
            if at_once is not None:
                at_once.run(at_once.reduce(given, result))
            else:
                calls.reduce(self._own.link, source, result, op, root, algorithm=algorithm)
        except BaseException as error:
            if self._own.refuse("reduce", given.nbytes, error):
                return False
            raise
        return True

    def _bcast(self, buf: Any, root: int) -> bool:
        self._check()
        found = self._data(buf, root)
        if found is None:
            return False
        (link, algorithm), data, rank = found
        try:
            calls.broadcast(link, data.array, rank, algorithm=algorithm)
        finally:
            data.put_back()
        return True

    def _data(self, buf: Any, root: int, least: float = 0) -> tuple[tuple[MpiComm, str], Memory, int] | None:
        """What a broadcast takes, if it is one for us."""
        data = payload(buf)
        if data is not None and data.array.nbytes < least:
            return None
        way = self._way("bcast", data.array.nbytes) if data is not None else None
        rank = _rank(root, way[0]) if way is not None else None
        if data is None or way is None or rank is None:
            return None
        if way[0].rank == rank:
            # What goes round may come back to the root: not into memory that must not be written.
            return way, Memory(data.array if data.array.flags.writeable else data.array.copy()), rank
        return (way, data, rank) if data.array.flags.writeable else None

    def _allgather(self, sendbuf: Any, recvbuf: Any) -> bool:
        self._check()
        result = payload(recvbuf, self.Get_size())
        way = self._way("allgather", result.array.nbytes) if result is not None else None
        if result is None or way is None or not result.array.flags.writeable:
            return False
        (link, algorithm), share = way, result.array.size // way[0].size
        own = result.array[link.rank * share : (link.rank + 1) * share]
        block = Memory(own.copy()) if sendbuf is MPI.IN_PLACE else payload(sendbuf)
        if block is None or block.array.size != share or _overlap(block, result):
            return False
        try:
            calls.allgather(link, block.array, result.array, algorithm=algorithm)
        finally:
            result.put_back()
        return True

    def _reduce_scatter(self, sendbuf: Any, recvbuf: Any, op: Any) -> bool:
        in_place = sendbuf is MPI.IN_PLACE
        mine = recvbuf if in_place else sendbuf
        self._check()
        known, source = _op(op), numbers(mine, self.Get_size())
        way = self._way("reduce_scatter", source.array.nbytes, source.array.dtype, known) if source is not None else None
        if way is None or known is None or source is None:
            return False
        share = source.array.size // way[0].size
        result = Memory(source.array[:share]) if in_place else numbers(recvbuf)
        if result is None or not _fits(source.array.dtype, share, result, known) or (_overlap(source, result) and not in_place):
            return False
        given = source.array.copy() if in_place else source.array
        try:
            at_once = self._own.reading(way[1], given.dtype) if known is SUM and given.size else None
            if at_once is not None:
                at_once.run(at_once.reduce_scatter(given, result.array))
            else:
                calls.reduce_scatter(way[0], given, result.array, known, algorithm=way[1])
        except BaseException as error:
            if self._own.refuse("reduce_scatter", given.nbytes, error):
                return False
            raise
        finally:
            (source if in_place else result).put_back()
        return True

    def _way(self, call: str, nbytes: int, dtype: Any = None, op: Op | None = SUM) -> tuple[MpiComm, str] | None:
        """Our own communicator and the algorithm, or None for the library, also if it knows ``op`` and we do not."""
        if op is None:
            return None
        private = self._private
        if private is None or private.link is None:
            if self.Get_size() == 1 or not self._worth(call, nbytes):
                return None
            private = self._own
        key = call if dtype is None or fused(dtype, op) else UNFUSED[call]
        algorithm = self._choice.algorithm(key, nbytes)
        if algorithm == LIBRARY or (private.refused and (call, nbytes.bit_length()) in private.refused):
            return None
        return private.link, algorithm

    def _start(self) -> None:
        super()._start()
        shortcuts.take(self, Faster, self._floors)

    def _stop(self) -> None:
        shortcuts.drop(self)
        super()._stop()

    def _moved(self, start: Callable[[], Started], buffers: Any, result: Memory) -> MPI.Request:
        try:
            return request_of(start(), buffers, result.put_back)
        finally:  # an exception of a signal's handler does not end what is under way
            self._own.look_after()


def _plain(sendbuf: Any, recvbuf: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Source and result, 1-D, of what most programs add up: whole arrays of a type that kernels take. None where it takes a
    closer look: this one is short."""
    if type(recvbuf) is not np.ndarray:
        return None
    dtype, flags = recvbuf.dtype, recvbuf.flags
    if (dtype is not _FLOAT32 and dtype is not _FLOAT64) or not flags.carray or not recvbuf.size:
        return None
    result = recvbuf if recvbuf.ndim == 1 else recvbuf.reshape(-1)
    if sendbuf is MPI.IN_PLACE:
        return result, result
    if type(sendbuf) is not np.ndarray or sendbuf.dtype is not dtype or sendbuf.size != recvbuf.size:
        return None
    others = sendbuf.flags
    if not (others.c_contiguous and others.aligned):
        return None
    apart = sendbuf is not recvbuf and flags.owndata and others.owndata
    if not apart and np.may_share_memory(sendbuf, recvbuf):
        return None
    return sendbuf if sendbuf.ndim == 1 else sendbuf.reshape(-1), result


def _op(op: Any) -> Op | None:
    """Ours of the same name."""
    for theirs, ours in _OPS:
        if op is theirs or op == theirs:
            return ours
    return None


def _rank(root: Any, link: MpiComm) -> int | None:
    """A root as a number; None for what mpi4py had better look at itself."""
    try:
        rank = index(root)
    except TypeError:
        return None
    return rank if 0 <= rank < link.size else None


def _fits(dtype: np.dtype, size: int, result: Memory, op: Op) -> bool:
    """What MPI and our algorithms both take."""
    array = result.array
    return bool(array.size == size and array.dtype.char == dtype.char and array.flags.writeable and _ordered(dtype, op))


def _ordered(dtype: np.dtype, op: Op) -> bool:
    return op is SUM or dtype.kind != "c" or op is PROD


def _overlap(source: Memory, result: Memory) -> bool:
    """Of two buffers that share memory the library says what it thinks of them, where all ranks leave that to it."""
    return source is not result and bool(np.may_share_memory(source.array, result.array))
