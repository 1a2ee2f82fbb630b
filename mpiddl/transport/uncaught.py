"""Errors that a program does not catch: each is printed once for all ranks, and without the frames of this package."""

from __future__ import annotations

import functools
import io
import linecache
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

from mpiddl.errors import MpiddlError
from mpiddl.machine import launch
from mpiddl.machine.clock import now

P = ParamSpec("P")
R = TypeVar("R")

GRACE_S = 10.0
"""Time in which all ranks must fail. A rank that has failed alone for so long ends the job. Ranks that share busy cores fail
seconds apart."""

TAG = 32766
"""Of the messages by which failing ranks find each other: almost the largest that MPI guarantees, which users seldom take."""

EXIT_S = 1.0
"""Without MPI, the head start of rank 0: a launcher ends the other ranks when one has left with an error."""

INNER = {"mpiddl", "click", "sklearn", "joblib", "numpy", "scipy", "numba", "torch"} | sys.stdlib_module_names
"""Packages whose frames tell a user nothing."""

spell: Callable[[str], str] = str
"""Puts a message into the words of the program's user; the command line sets it."""


def public(function: Callable[P, R]) -> Callable[P, R]:
    """A public function: an `MpiddlError` leaves it without the frames inside this package."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        __tracebackhide__ = True  # IPython and pytest then leave this frame out as well
        try:
            return function(*args, **options)
        except MpiddlError as error:
            print_once()
            raise error.with_traceback(None)  # noqa: B904
        except Exception:  # of the caller's model, say: its frames are what is looked for
            print_once()
            raise

    return call


def print_once() -> None:
    """From now on, print an uncaught error of ours once for all ranks. On one rank a hook of the program's own stays."""
    several = _world().size > 1 if _world() else launch.promise(os.environ).size > 1
    if (several or sys.excepthook is sys.__excepthook__) and not isinstance(sys.excepthook, _Once):
        sys.excepthook = _Once(sys.excepthook)


def _world() -> Any:
    """COMM_WORLD while MPI is in use, else None."""
    MPI: Any = sys.modules.get("mpi4py.MPI")
    return MPI.COMM_WORLD if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized() else None


class _Once:
    """``sys.excepthook``: errors of ours, and those with which all ranks left a run.

    Any other goes to the hook before it. If only some ranks raise it, the job ends, because the others would wait forever.

    ``error.agreed`` says how many ranks left with it, ``error.speaks`` whether this one is the lowest of them (`MpiComm.fail`).
    """

    def __init__(self, before: Callable[..., Any]):
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not hasattr(error, "speaks") and not isinstance(error, MpiddlError):
            if any(_package(step) == "mpiddl" for step in _steps(trace)):
                _trim(error)
            self._before(kind, error, error.__traceback__)
            _show_held_back()
            world = _world()
            if world is not None and world.size > 1 and isinstance(error, Exception) and not _all_fail(world):
                _abort(world, 1)
        elif _speaks(error):
            where = place(trace) if isinstance(error, MpiddlError) else ""
            print(f"{where}mpiddl: error: {text(error)}", file=sys.stderr, flush=True)


def _show_held_back() -> None:
    """Print what a hook outside of ours has collected: torch.distributed puts a buffer in the place of ``sys.stderr``, which
    would be lost where the job ends."""
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        print(sys.stderr.getvalue(), end="", file=sys.__stderr__, flush=True)
        sys.stderr.seek(0)
        sys.stderr.truncate()


def _speaks(error: BaseException) -> bool:
    """Whether this is the lowest rank that fails; a rank that has failed alone ends the job."""
    world, agreed = _world(), getattr(error, "agreed", 0)
    if world is None:
        if launch.promise(os.environ).rank:
            time.sleep(EXIT_S)
        return True
    if 0 < agreed < world.size:
        return bool(error.speaks)  # type: ignore[attr-defined]
    if _all_fail(world):
        return bool(world.rank == 0)
    if not agreed:
        end_job(world, error)
    return True  # other ranks have caught it, or are not here yet


def _all_fail(world: Any) -> bool:
    """Whether every rank comes here within the grace: all tell rank 0, which answers."""
    others, nothing = range(1, world.size) if world.rank == 0 else [0], bytearray()
    if world.rank:
        world.Isend([nothing, 0], 0, TAG)
    waiting = [world.Irecv([nothing, 0], other, TAG) for other in others]
    deadline = now() + GRACE_S
    while not all(request.Test() for request in waiting):
        if now() > deadline:
            return False
        time.sleep(0.005)
    for other in others if world.rank == 0 else ():
        world.Send([nothing, 0], other, TAG)
    return True


def end_job(raw: Any, error: BaseException, where: str = "") -> NoReturn:
    """Print an error that this rank alone has met, and end the job: the others would wait for it for ever."""
    told = f"mpiddl: error on rank {raw.Get_rank()} of {raw.Get_size()}{where}, the job ends: {_words(error)}"
    print(told, file=sys.stderr, flush=True)
    _abort(raw, getattr(error, "exit_code", 1))


def _abort(raw: Any, code: int) -> NoReturn:
    try:
        _show_held_back()
        raw.Abort(code)  # Open MPI may return from it
        sys.stdout.flush()
    finally:
        os._exit(code)


def text(error: BaseException) -> str:
    """What is said of an error: its message; of a bug, the ranks that met it and the traceback."""
    bug = not isinstance(error, MpiddlError) and hasattr(error, "ranks")
    return f"{error.ranks} failed:\n{_words(error)}" if bug else _words(error)  # type: ignore[attr-defined]


def _words(error: BaseException) -> str:
    return spell(str(error)) if isinstance(error, MpiddlError) else trace_of(error)


def trace_of(error: BaseException) -> str:
    """The traceback as text, without frames of this package between two of the caller's."""
    _trim(error)
    return "".join(traceback.format_exception(error)).rstrip()


def _trim(error: BaseException) -> None:
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = _outer(each.__traceback__)
        each = each.__cause__ or each.__context__


def _outer(trace: TracebackType | None) -> TracebackType | None:
    """The caller's frames, and all below the last of them: what a bug of ours needs."""
    steps, kept = _steps(trace), None
    last = max((number for number, step in enumerate(steps) if _is_callers(step)), default=0)
    for number, step in reversed(list(enumerate(steps))):
        if number >= last or _is_callers(step):
            kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return kept


def _steps(trace: TracebackType | None) -> list[TracebackType]:
    steps = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    return steps


def _is_callers(step: TracebackType) -> bool:
    return _package(step) not in INNER


def _package(step: TracebackType) -> str:
    return str(step.tb_frame.f_globals.get("__name__")).partition(".")[0]


def place(trace: TracebackType | None) -> str:
    """The caller's line from which we were called, as ``program.py:12: mpiddl.train(...)`` and a new line."""
    for step in reversed(_steps(trace)):
        if _is_callers(step):
            name = step.tb_frame.f_code.co_filename
            line = linecache.getline(name, step.tb_lineno, step.tb_frame.f_globals).strip()
            return f"{name}:{step.tb_lineno}{f': {line}' if line else ''}\n"
    return ""
