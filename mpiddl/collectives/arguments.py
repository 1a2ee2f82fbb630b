"""Checks of what a collective is called with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mpiddl.errors import CommError, ShapeError, UsageError
from mpiddl.transport.agree import agreed, check_equal
from mpiddl.transport.base import COMBINE, IN_PLACE, MAX, MIN, REDUCED, SUM, Op
from mpiddl.transport.comm import Comm

FUSED = "fd"
"""Types, by numpy's characters, of which a compiled kernel adds the arrays of a node in shared memory."""


def flat_pair(comm: Comm, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> tuple[np.ndarray, np.ndarray]:
    """Source and result of an all-reduce as 1-D views, the same one if it is in place; checked.

    Raises
    ------
    CommError
        If ``comm`` was freed.
    ShapeError
        A buffer is no numpy array, is not C-contiguous, has another size or dtype than the other one, overlaps it, or
        cannot be written.
    UsageError
        The dtype has no arithmetic in MPI; complex numbers have no order for MIN and MAX.
    """
    check_alive(comm)
    result = flat("recvbuf", recvbuf, writable=True)
    check_op(op, result.dtype)
    if sendbuf is IN_PLACE:
        return result, result
    source = flat("sendbuf", sendbuf)
    if source.dtype != result.dtype or source.size != result.size:
        raise ShapeError(f"recvbuf: got {_shape(result)}, expected {_shape(source)}, as in sendbuf")
    if source is not result and np.may_share_memory(source, result) and source.size:
        if source.ctypes.data != result.ctypes.data:
            raise ShapeError("sendbuf and recvbuf: got overlapping buffers, expected separate buffers, or IN_PLACE as sendbuf")
        return result, result
    return source, result


def flat(name: str, array: Any, writable: bool = False) -> np.ndarray:
    """The 1-D view of a C-contiguous array of a dtype that MPI can move and reduce."""
    if not isinstance(array, np.ndarray):
        raise ShapeError(f"{name}: got {type(array).__name__}, expected a numpy array")
    if isinstance(array, np.ma.MaskedArray):
        raise ShapeError(f"{name}: got a masked array, expected an array without a mask: array.filled(0)")
    if not array.flags.c_contiguous:
        raise ShapeError(f"{name}: got an array that is not contiguous, expected a contiguous array: "
                         "np.ascontiguousarray(array)")
    if not array.flags.aligned:
        raise ShapeError(f"{name}: got an array that is not aligned, expected an aligned array: array.copy()")
    if writable and not array.flags.writeable:
        raise ShapeError(f"{name}: got a read-only array, expected a writable array for the result")
    if array.dtype.char not in REDUCED or not array.dtype.isnative:
        raise UsageError(f"{name}: got dtype {array.dtype}, expected an integer, float or complex dtype that MPI supports")
    plain = array if type(array) is np.ndarray else array.view(np.ndarray)  # a matrix has two axes whatever is done to it
    return plain.reshape(-1)


def fused(dtype: np.dtype, op: Op) -> bool:
    """Whether a compiled kernel reduces arrays of this type with ``op`` in the shared memory of a node."""
    return op is SUM and dtype.char in FUSED


def check_op(op: Any, dtype: np.dtype) -> None:
    """Raise a `UsageError` for what is no reduction, or none of complex numbers."""
    if not isinstance(op, Op):
        raise UsageError(f"op: got {op!r}, expected an operation of mpiddl.transport.base: "
                         f"{', '.join(known.name for known in COMBINE)}")
    if dtype.kind == "c" and op in (MIN, MAX):
        raise UsageError(f"op: got {op.name} for {dtype}, expected SUM or PROD, because complex numbers have no order")


def plan_dtype(size: Any, dtype: Any, op: Any) -> np.dtype:
    """The dtype of what is set up for calls of one size, if all three make sense; a `UsageError` or `ShapeError` if not."""
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise UsageError(f"dtype: got {dtype!r}, expected a numpy dtype ({error})") from None
    flat("dtype", np.empty(0, kind))
    check_op(op, kind)
    check_whole("size", size, 0)
    return kind


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise a `ShapeError` for what is no whole number, or too small a one."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ShapeError(f"{name}: got {value!r}, expected a whole number of {least} or more")


def check_root(comm: Comm, root: Any) -> None:
    """Raise a `UsageError` for what is no rank."""
    if not isinstance(root, (int, np.integer)) or not 0 <= root < comm.size:
        raise UsageError(f"root: got {root!r}, expected a rank from 0 to {comm.size - 1}")


def check_alive(comm: Comm) -> None:
    """Raise a `UsageError` for what is no communicator of ours, a `CommError` for one that was freed or is broken."""
    if not isinstance(comm, Comm):
        raise UsageError(f"comm: got {type(comm).__name__}, expected a communicator from mpiddl.transport.mpi.connect()")
    if comm.freed:
        raise CommError("comm: got a freed communicator, expected a communicator that was not freed")
    if comm.broken:
        raise CommError("comm: this communicator cannot be used any more, because an exception ended a collective call early")


def checking(comm: Comm, checked: bool) -> AbstractContextManager[None]:
    """Where a call's arguments are looked at: what one rank finds wrong, all raise, if the call is ``checked``."""
    return agreed(comm) if checked else nullcontext()


def check_alike(comm: Comm, call: str, **values: Any) -> None:
    """Raise a `MismatchError` on every rank unless all ranks make the same ``call``; costs an all-gather."""
    check_equal(comm, call, {"call": call, **{name: str(value) for name, value in values.items()}})


def _shape(array: np.ndarray) -> str:
    return f"{array.size} {array.dtype}"
