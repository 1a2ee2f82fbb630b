"""Messages as mpi4py takes them - ``array``, ``[data, type]``, ``[data, count, type]``, ``[data, (count, displ), type]`` ... -
seen as flat numpy arrays. Whatever is not understood here is left to mpi4py, with its own errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from mpiddl.transport.base import REDUCED
from mpiddl.transport.start import load_mpi

_mpi = cache(load_mpi)

NUMBERS = frozenset([
    "SIGNED_CHAR", "SHORT", "INT", "LONG", "LONG_LONG", "LONG_LONG_INT", "INT8_T", "INT16_T", "INT32_T", "INT64_T",
    "UNSIGNED_CHAR", "UNSIGNED_SHORT", "UNSIGNED", "UNSIGNED_LONG", "UNSIGNED_LONG_LONG", "UINT8_T", "UINT16_T", "UINT32_T",
    "UINT64_T", "FLOAT", "DOUBLE", "LONG_DOUBLE", "C_COMPLEX", "C_FLOAT_COMPLEX", "C_DOUBLE_COMPLEX", "C_LONG_DOUBLE_COMPLEX",
])  # fmt: skip
"""MPI's names of types that are reduced; not bytes, letters and truth values, though these have numbers' sizes."""


class Parts(NamedTuple):
    """A message taken apart; ``number`` None: as many as there are, ``kind`` None: the buffer's own type."""

    buffer: Any
    number: int | None
    displ: int
    kind: Any


class Memory(NamedTuple):
    """Elements of a message: an array that holds them, and where they have to be copied back to, if they have."""

    array: np.ndarray
    home: Callable[[np.ndarray], None] | None = None

    def put_back(self) -> None:
        """What was written into ``array`` is written into the message."""
        if self.home is not None:
            self.home(self.array)


def largest(spec: Any) -> float:
    """No fewer bytes than the message has; infinity where that takes a closer look."""
    if type(spec) is np.ndarray:
        return spec.nbytes
    if isinstance(spec, (list, tuple)) and spec:
        kind = spec[-1]
        if isinstance(kind, _mpi().Datatype) and not kind.is_predefined:
            return np.inf  # what it picks out may be more than there is: the same elements again and again
        return largest(spec[0]) or np.inf  # MPI.BOTTOM, which has no bytes of its own
    try:
        return memoryview(spec).nbytes
    except TypeError:
        return np.inf


def numbers(spec: Any, blocks: int = 1) -> Memory | None:
    """The elements of a message of numbers that can be reduced, 1-D; None for what mpi4py had better look at itself.

    ``blocks``: what has no count is so many blocks, and all of them are meant.
    """
    if type(spec) is np.ndarray and blocks == 1:  # what most programs give, looked at as shortly as that can be done
        flags, dtype = spec.flags, spec.dtype
        if flags.c_contiguous and flags.aligned and dtype.char in REDUCED and dtype.isnative:
            return Memory(spec if spec.ndim == 1 else spec.reshape(-1))
    parts = _parts(spec)
    array = None if parts is None else _array(parts.buffer)
    if array is None or parts is None:
        return None
    kind = array.dtype if parts.kind is None else _number(parts.kind)
    if kind is None or kind.char not in REDUCED or not kind.isnative:
        return None
    raw, begin = array.view(np.uint8), parts.displ * kind.itemsize
    if parts.number is None and (raw.size - begin) % (kind.itemsize * blocks):
        return None
    count = (raw.size - begin) // kind.itemsize if parts.number is None else parts.number * blocks
    part = raw[begin : begin + count * kind.itemsize]
    if part.size != count * kind.itemsize:
        return None
    if part.ctypes.data % kind.alignment == 0:
        return Memory(part.view(kind))

    def home(filled: np.ndarray) -> None:
        part[:] = filled.view(np.uint8)

    copy = part.copy().view(kind)
    copy.flags.writeable = part.flags.writeable
    return Memory(copy, home)


def payload(spec: Any, blocks: int = 1) -> Memory | None:
    """The bytes of any message, one behind the other; where they do not lie so, they are packed. None as for `numbers`."""
    parts = _parts(spec)
    if parts is None:
        return None
    array = _array(parts.buffer)
    kind = parts.kind if not isinstance(parts.kind, str) else _named(parts.kind)
    if array is not None and kind is None and parts.kind is None and _simple(array.dtype):
        size = array.itemsize
    elif array is not None and kind is not None and kind.is_predefined and kind != _mpi().DATATYPE_NULL:
        size = kind.Get_size()
        if kind.Get_extent() != (0, size):
            return _packed(parts, blocks)
    else:
        return _packed(parts, blocks)
    raw, begin = array.view(np.uint8), parts.displ * size
    if parts.number is None and (raw.size - begin) % (size * blocks):
        return None
    count = (raw.size - begin) // size if parts.number is None else parts.number * blocks
    part = raw[begin : begin + count * size]
    return Memory(part) if part.size == count * size else None


def _packed(parts: Parts, blocks: int) -> Memory | None:
    """A copy of what the message picks out: sent to oneself, for nobody knows better than the library what that is."""
    mpi = _mpi()
    number = None if parts.number is None else parts.number * blocks
    whole = parts.buffer if number is None and parts.kind is None else [parts.buffer, (number, parts.displ), parts.kind]
    if number is None and parts.kind is not None:
        whole = [parts.buffer, parts.kind] if not parts.displ else [parts.buffer, None, parts.displ, parts.kind]
    own, tag = to_oneself(), next(TAGS)
    try:
        request = own.Isend(whole, 0, tag)
    except Exception:
        return None  # mpi4py will say it once more, where it was asked
    status = mpi.Status()
    own.Probe(0, tag, status)
    array = np.empty(status.Get_count(mpi.BYTE), np.uint8)
    own.Recv([array, mpi.PACKED], 0, tag)
    request.Wait()

    def home(filled: np.ndarray) -> None:
        tag = next(TAGS)
        back = own.Isend([filled, mpi.PACKED], 0, tag)
        try:
            own.Recv(whole, 0, tag)
        except Exception:
            own.Recv([filled.copy(), mpi.PACKED], 0, tag)  # so that nothing of it is left behind
            raise
        finally:
            back.Wait()

    return Memory(array, home)


TAGS = cycle(range(32_768))
"""Of messages to oneself, each with its own: several threads may send them at a time. MPI grants tags so far."""

_MAKING = Lock()


def to_oneself(purpose: str = "packing") -> Any:
    """A communicator for messages of this rank to itself, one for each ``purpose``.

    Tags repeat. Messages that may be in flight for long therefore need a communicator of their own.
    """
    with _MAKING:
        return _own_self(purpose)


@cache
def _own_self(purpose: str) -> Any:
    made = _mpi().Intracomm(_mpi().COMM_SELF).Dup()
    made.Set_errhandler(_mpi().ERRORS_RETURN)  # exceptions, whatever a program does with COMM_SELF's
    return made


def _parts(spec: Any) -> Parts | None:
    """As mpi4py reads it."""
    if not isinstance(spec, (list, tuple)):
        return Parts(spec, None, 0, None)
    if not 2 <= len(spec) <= 4:
        return None
    buffer, *rest = spec
    count, displ, kind = None, None, None
    if len(rest) == 3:
        count, displ, kind = rest
    elif len(rest) == 2:
        count, kind = rest
    elif _is_type(rest[0]):
        kind = rest[0]
    else:
        count = rest[0]
    if isinstance(count, (list, tuple)):
        if len(count) != 2:
            return None
        count, displ = count
    try:
        count = None if count is None else int(count.__index__())
        displ = 0 if displ is None else int(displ.__index__())
    except AttributeError:
        return None
    return None if displ < 0 or (count or 0) < 0 else Parts(buffer, count, displ, kind)


def _is_type(thing: Any) -> bool:
    return isinstance(thing, (str, _mpi().Datatype))


def _array(buffer: Any) -> np.ndarray | None:
    """A contiguous buffer as a 1-D array; None of anything else."""
    if buffer is None:
        return np.empty(0, np.uint8)
    try:
        # A matrix would stay 2-D for ever, a masked array has a mask that MPI knows nothing of: seen as what lies in memory.
        array = buffer.view(np.ndarray) if isinstance(buffer, np.ndarray) else np.asarray(memoryview(buffer))
    except (TypeError, ValueError, BufferError):
        return None
    if array.dtype.hasobject or not array.dtype.itemsize:
        return None
    if array.flags.c_contiguous:
        return array.reshape(-1)
    return array.T.reshape(-1) if array.flags.f_contiguous else None


def _simple(kind: np.dtype) -> bool:
    """Whether mpi4py sees a type of MPI's in it."""
    return kind.isnative and (kind.char in REDUCED + "?ce" or kind == np.dtype("S1"))


def _number(kind: Any) -> np.dtype | None:
    """numpy's name of one of MPI's types of numbers."""
    found = _named(kind) if isinstance(kind, str) else kind
    if found is None or not found.is_predefined or found.Get_name().removeprefix("MPI_") not in NUMBERS:
        return None
    try:
        return np.dtype(found.tocode())
    except (TypeError, ValueError):
        return None


def _named(name: str) -> Any:
    """The datatype that mpi4py calls so, or None."""
    return getattr(_mpi(), "_typedict", {}).get(name)
