"""What all collectives share: how one is under way, what it may be called with, how an array is cut.

A collective is written as a generator that *yields what it waits for*: receives, sends, meetings of a node's ranks. Whoever
drives it decides how to wait. `Started.Wait` blocks, `Started.Test` goes on as far as it can and returns, and a
progress thread (`mpiddl.collectives.progress`) does that while the main thread computes. So each algorithm is written once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mpiddl.errors import CommError, ShapeError, UsageError
from mpiddl.transport.agree import agreed, check_equal
from mpiddl.transport.base import COMBINE, IN_PLACE, MAX, MIN, REDUCED, SUM, Op, Request
from mpiddl.transport.comm import Comm
from mpiddl.transport.meter import booked

Steps = Iterator[Request]

LARGEST = 2**31 - 1
"""Elements of one message that every MPI library takes."""

FUSED = "fd"
"""Types, by numpy's characters, of which a compiled kernel adds the arrays of a node in shared memory."""


class Started:
    """A collective under way on this rank; a request like those of `mpiddl.transport`.

    Other ranks wait for this one's part: ``Test`` (or `progress.Progress`) moves it on between ``start`` and ``Wait``.

    An exception that comes in while ``Wait`` waits, for this one or moving others on, from a signal's handler, is held back
    until it is over, as calls of MPI do it; out of ``Test`` it comes at once, and nothing is lost. One that comes inside a
    step ends a collective, as do a second one and what the library raises. Then the communicator is ``broken``: the ranks
    disagree on what was sent, and no further collective is begun on it.
    """

    def __init__(self, comm: Comm, wires: tuple[Any, ...], steps: Steps, queue: Queue | None = None, blocking: bool = False):
        self._comm, self._wires, self._steps, self._queue = comm, wires, steps, queue
        self._lock = threading.Lock()  # a progress thread may test while the main thread waits
        self._pending: Request | None = None
        self._arrived = comm.now()
        self._entered = self._arrived if blocking else None  # since when this rank only waits for the result
        self._over = False
        self._then: list[Callable[[], None]] = []
        self._beside = comm.started
        self.failure: BaseException | None = None
        self._held, comm.held = comm.held, None
        # First as far as it goes, then known to others: a progress thread must not draw its tag, later than a next one's.
        with self._lock:
            self._drive_on()
            if not self._over:
                self._beside.append(self)
        if not blocking:
            comm.meter.moving += comm.now() - self._arrived

    def Wait(self) -> None:
        if self._entered is None:
            self._entered = self._comm.now()
        if self._comm.freed:
            self.give_up("its communicator was freed")
        while not self._over:
            try:
                while not self._over and any(other is not self for other in self._beside):
                    self._all_go_on()
                    os.sched_yield()
                with self._lock:
                    self._drive(_wait)
            except BaseException as error:
                with self._lock:
                    self._hold_back(error)
        self.check()

    def Test(self) -> bool:
        """Go on as far as is possible without waiting; returns whether that was the end."""
        with booked(self._comm, "moving"):
            self._all_go_on()
        self.check()
        return self._over

    def check(self) -> None:
        """Raise what it failed with, or what was held back, once."""
        error, self._held = self.failure or self._held, None
        if error is not None:
            raise error

    def then(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once it is over, by whoever brings it to its end; at once if it is."""
        with self._lock:
            over = self._over
            if not over:
                self._then.append(call)
        if over:
            call()

    @property
    def of(self) -> Any:
        """The communicator it was started on."""
        return self._comm

    @property
    def over(self) -> bool:
        """Whether it has come to its end; a look, which moves nothing on."""
        return self._over

    @property
    def idle(self) -> bool:
        """Nobody is moving it on just now."""
        return not self._lock.locked()

    def give_up(self, why: str) -> None:
        """Its memory or communicator goes: it fails, and is not moved on again."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._over:
                    self.failure = CommError(f"request: {why} while it was under way; expected Wait() before")
                    self._finish()
            finally:
                self._lock.release()

    def _all_go_on(self) -> None:
        """This one and what else this rank has started: another rank may wait for our part of that first."""
        for started in list(self._beside):
            started.move_on()

    def move_on(self) -> None:
        """As far as it goes without waiting, unless another thread is at it; what goes wrong with it is kept for `Wait`.

        What a signal's handler raises meanwhile is the caller's: whoever waits for this one may do so in the library, unasked.
        """
        if self._comm.freed:
            self.give_up("its communicator was freed")
        if self._lock.acquire(blocking=False):
            try:
                self._drive(_test)
            finally:
                self._lock.release()

    def _drive(self, is_there: Callable[[Request], bool]) -> None:
        stepping = False
        try:
            while not self._over:
                if self._pending is None:
                    stepping = True
                    self._pending = next(self._steps, None)
                    stepping = False
                if self._pending is None:
                    self._finish()
                elif not is_there(self._pending):
                    break
                self._pending = None
        except BaseException as error:
            if not (self._over or stepping) and getattr(self._pending, "failure", None) is None:
                raise  # what is waited for can be asked again, and the next step is not begun
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _drive_on(self) -> None:
        """As far as it goes without waiting; what a signal's handler raises is held back."""
        try:
            self._drive(_test)
        except BaseException as error:
            self._hold_back(error)

    def _hold_back(self, error: BaseException) -> None:
        """Keep it until this rank has waited for the result; a second one ends that."""
        if self._over or self._held is None:
            self._held = self._held or error
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        if not self._over:
            self._comm.broken = True
            self._finish()

    def _finish(self) -> None:
        """Count how long it took, and all that has been sent so far: of others on the same wire, too, but once."""
        self._over = True
        if self in self._beside:
            self._beside.remove(self)
        for wire in self._wires:
            nbytes, messages = wire.meter.bytes, wire.meter.messages
            wire.meter.sent(-nbytes, -messages)
            self._comm.meter.sent(nbytes, messages)
        left = self._comm.now()
        self._comm.meter.synchronised(self._arrived, left if self._entered is None else self._entered, left)
        while self._then:
            self._then.pop(0)()


def go_on(comm: Comm, several: Sequence[Started]) -> None:
    """Move several on as far as they go without waiting; a single call of the MPI library asks for all of them.

    So many Python steps a request are spared that a thread can do it thousands of times a second.
    """
    for started in several:
        if started._comm.freed:
            started.move_on()
    held = [started for started in several if not started._over and started._lock.acquire(blocking=False)]
    try:
        # Held to the end: what the library has once called complete it never names again.
        for started, done in zip(held, comm.test_some([started._pending for started in held]), strict=True):
            if done:
                started._drive_on()
    finally:
        for started in held:
            started._lock.release()


def _wait(request: Request) -> bool:
    request.Wait()
    return True


def _test(request: Request) -> bool:
    """Of a collective that waits for another: that one is only looked at. Whoever asks has them all go on, each once; if each
    had all others go on again, some dozens would take for ever."""
    if isinstance(request, Started):
        request.check()
        return request.over
    return request.Test()


def block_bounds(n: int, parts: int, part: int) -> tuple[int, int]:
    """Begin and end of part ``part`` of ``n`` elements in ``parts`` contiguous parts whose sizes differ by one at most.

    Examples
    --------
    >>> [block_bounds(7, 3, part) for part in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    whole, rest = divmod(n, parts)
    return part * whole + min(part, rest), (part + 1) * whole + min(part + 1, rest)


def ceil_div(n: int, parts: int) -> int:
    """n / parts, rounded up."""
    return -(-n // parts)


def pieces(n: int, most: int) -> list[slice]:
    """``n`` elements in order, ``most`` at a time.

    Examples
    --------
    >>> pieces(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(begin, min(begin + most, n)) for begin in range(0, n, most)]


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


def run(comm: Comm, wires: tuple[Any, ...], steps: Steps, blocking: bool, queue: Queue | None = None) -> Started:
    """Drive a collective to its end, or to where it first has to wait; after those before it in ``queue``."""
    if queue is not None:
        steps = _after(queue.last, steps)
    try:
        started = Started(comm, wires, steps, queue, blocking)
    except BaseException:
        comm.broken = True
        raise
    if queue is not None:
        queue.last = started
    started.Wait() if blocking else started.check()
    return started


class Queue:
    """Collectives that use the same memory, one after the other; ``last`` is the one that was started last."""

    last: Started | None = None

    def give_up(self, why: str) -> None:
        """The memory goes: what is under way in it fails."""
        for started in list(self.last._beside) if self.last is not None else ():
            if started._queue is self:
                started.give_up(why)


def _after(before: Started | None, steps: Steps) -> Steps:
    """Waits for ``before``, and drives it on while it does: nobody else may."""
    if before is not None:
        yield before
    yield from steps


def _shape(array: np.ndarray) -> str:
    return f"{array.size} {array.dtype}"


Own = Callable[[int, int], np.ndarray]
