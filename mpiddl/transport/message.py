"""Messages as mpi4py takes them - ``array``, ``[data, type]``, ``[data, count, type]``, ``[data, (count, displ), type]`` ... -
seen as flat numpy arrays. Whatever is not understood here is left to mpi4py, with its own errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpiddl.transport.start import load_mpi

REDUCED = "bhilqBHILQfdgFDG"
"""Type characters that numpy and MPI both reduce."""


class Parts(NamedTuple):
    """A message taken apart; ``number`` None: as many as there are, ``kind`` None: the buffer's own type."""

    buffer: Any
    number: int | None
    displ: int
    kind: Any


class Memory(NamedTuple):
    """Elements of a message: an array that holds them, and where they have to be copied back to, if they have."""

    array: np.ndarray
    home: Any = None

    def put_back(self) -> None:
        """What was written into ``array`` is written into the message."""
        if self.home is not None:
            self.home(self.array)


def largest(spec: Any) -> float:
    """No fewer bytes than the message has; infinity where that takes a closer look."""
    if type(spec) is np.ndarray:
        return spec.nbytes
    if isinstance(spec, (list, tuple)) and spec:
        return largest(spec[0])
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
    raw = None if parts is None else _bytes(parts.buffer)
    if raw is None or parts is None:
        return None
    kind = _own_dtype(parts.buffer) if parts.kind is None else _dtype(parts.kind)
    if kind is None or kind.char not in REDUCED:
        return None
    begin = parts.displ * kind.itemsize
    count = (raw.size - begin) // kind.itemsize if parts.number is None else parts.number * blocks
    if begin + count * kind.itemsize > raw.size or (parts.number is None and _uneven(raw.size - begin, kind.itemsize, blocks)):
        return None
    part = raw[begin : begin + count * kind.itemsize]
    if part.ctypes.data % kind.alignment == 0:
        return Memory(part.view(kind))

    def home(array: np.ndarray) -> None:
        part[:] = array.view(np.uint8)

    return Memory(part.copy().view(kind), home)


def payload(spec: Any, blocks: int = 1) -> Memory | None:
    """The bytes of any message, one behind the other: packed where its type leaves gaps. None as for `numbers`."""
    parts = _parts(spec)
    raw = None if parts is None else _bytes(parts.buffer)
    if raw is None or parts is None:
        return None
    kind = parts.kind if not isinstance(parts.kind, str) else _named(parts.kind)
    if parts.kind is None and (own := _own_dtype(parts.buffer)) is not None:
        size = extent = own.itemsize
    elif kind is not None and kind != load_mpi().DATATYPE_NULL:
        (lower, extent), size = kind.Get_extent(), kind.Get_size()
        if lower or extent <= 0:
            return None
    else:
        return None
    begin = parts.displ * extent
    count = (raw.size - begin) // extent if parts.number is None else parts.number * blocks
    if begin > raw.size or (parts.number is None and _uneven(raw.size - begin, extent, blocks)):
        return None
    if kind is None or kind.is_predefined:
        fits = begin + count * extent <= raw.size
        return Memory(raw[begin : begin + count * extent]) if fits else None
    return _packed(raw, begin, count, kind, size) if count else Memory(raw[:0])


def _packed(raw: np.ndarray, begin: int, count: int, kind: Any, size: int) -> Memory | None:
    """A copy of what a derived type picks out."""
    mpi = load_mpi()
    whole = kind.Create_contiguous(count).Commit()
    # mpi4py counts by extents, of which the last may reach beyond the buffer, into a gap.
    area = mpi.memory.fromaddress(raw.ctypes.data + begin, whole.Get_extent()[1])
    array = np.empty(count * size, np.uint8)
    whole.Pack(area, array, 0, mpi.COMM_SELF)

    def home(filled: np.ndarray) -> None:
        whole.Unpack(filled, 0, area, mpi.COMM_SELF)

    return Memory(array, home)


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
    return isinstance(thing, (str, load_mpi().Datatype))


def _bytes(buffer: Any) -> np.ndarray | None:
    """The memory of a contiguous buffer; None of anything else."""
    if isinstance(buffer, np.ndarray):
        if buffer.flags.c_contiguous:
            return buffer.reshape(-1).view(np.uint8) if buffer.dtype.itemsize and not buffer.dtype.hasobject else None
        return buffer.T.reshape(-1).view(np.uint8) if buffer.flags.f_contiguous and not buffer.dtype.hasobject else None
    try:
        view = memoryview(buffer)
        return np.frombuffer(view, np.uint8) if view.contiguous and view.nbytes else None
    except (TypeError, ValueError, BufferError):
        return None


def _own_dtype(buffer: Any) -> np.dtype | None:
    """The type of a buffer's elements, if it is a simple one of this machine."""
    try:
        kind = buffer.dtype if isinstance(buffer, np.ndarray) else np.dtype(memoryview(buffer).format)
    except TypeError:
        return None
    return kind if kind.isnative and kind.fields is None and kind.subdtype is None and kind.char in REDUCED + "?ce" else None


def _dtype(kind: Any) -> np.dtype | None:
    """numpy's name of one of MPI's simple types; bytes are none: MPI does not reduce them."""
    try:
        found = np.dtype(_named(kind).tocode() if isinstance(kind, str) else kind.tocode())
        if kind == load_mpi().BYTE:
            return None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return found if found.fields is None and found.subdtype is None else None


def _named(name: str) -> Any:
    """The datatype that mpi4py calls so, or None."""
    from mpi4py.util.dtlib import from_numpy_dtype

    mpi = load_mpi()
    found = getattr(mpi, "_typedict", {}).get(name)
    if found is not None:
        return found
    try:
        return from_numpy_dtype(name)
    except (TypeError, ValueError):
        return None


def _uneven(nbytes: int, extent: int, blocks: int) -> bool:
    return nbytes % (extent * blocks) != 0
