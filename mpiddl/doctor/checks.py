"""Is everything in place? Checks of the installation, the launcher, the nodes and MPI, each with its remedy.

They run alone, under mpiexec and under srun, each guarded by itself: a check that fails becomes a finding,
and the others go on. Those that communicate (`mpiddl.doctor.probes`) run on all ranks in the same order. A rank
that fails in one of them may leave the others waiting in a call that takes no time limit, so an alarm is set
for each: when it goes off, every rank says where it is, and the job ends.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from mpiddl.doctor import probes
from mpiddl.doctor.check_result import Finding, show, worst
from mpiddl.errors import MpiddlError
from mpiddl.machine import kernel_cache, launch
from mpiddl.machine.launch_line import launch_line, this_machine
from mpiddl.transport.start import environment_trouble, initialise, load_mpi, memory_trouble
from mpiddl.version import __version__

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Alarm", "Finding", "examine", "run", "show"]

LIMIT_S = 30.0
LEAST_FREE = 64 << 20  # bytes: a checkpoint of five million float32 parameters with Adam's two moments


def run(comm: MPI.Intracomm | None = None, *, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> list[Finding]:
    """Every finding of `examine`, as a list."""
    return list(examine(comm, env=env, limit_s=limit_s))


def examine(comm: MPI.Intracomm | None = None, *, env: Mapping[str, str] | None = None,
            limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Check one thing after the other.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        The ranks to check; None starts MPI, where that is possible, and takes ``MPI.COMM_WORLD``.
    env : mapping, optional
        The environment of this process; None means ``os.environ``.
    limit_s : float
        Seconds that a check which communicates may take; then the job is ended.

    Yields
    ------
    Finding
        The same on every rank: where ranks differ, the worst, with the ranks it was found on.

    Communication
    -------------
    Collective over ``comm``, of which a duplicate is made and freed; every rank takes every finding.
    """
    env = os.environ if env is None else env
    world, started = _start(env, limit_s)
    mine = [*(_guarded(name, check, env) for name, check in LOCAL.items()), *started]
    if world is None:
        yield from mine
        _let_the_first_speak(env)
        return
    ranks = world if comm is None else comm
    with Alarm(ranks, "comparing the ranks", limit_s):
        comm = ranks.Dup()
        per_rank = comm.allgather(mine)
    yield from map(worst, zip(*per_rank, strict=True))
    for name, probe in probes.PROBES.items():
        yield _together(comm, name, probe, env, limit_s)
    comm.Free()
    if world.size == 1:
        _let_the_first_speak(env)


def _let_the_first_speak(env: Mapping[str, str]) -> None:
    """Wait where this process is one of several without a common world, and not the one that prints.

    A launcher kills all processes once one leaves with an error, so that the promised rank 0 has to go first.
    """
    if launch.promise(env).rank:
        time.sleep(1.0)


class Alarm:
    """Says where this rank is, and ends the job, if its block takes longer than ``limit_s`` seconds.

    MPI's blocking calls take no time limit, so that a thread has to look at the clock; mpi4py gives up the
    interpreter lock in them. ``trouble`` is what went wrong on this rank, for the message.
    """

    def __init__(self, comm: MPI.Intracomm, name: str, limit_s: float):
        self.comm, self.name, self.limit_s, self.trouble = comm, name, limit_s, ""
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Alarm:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        why = f"it failed here ({self.trouble})" if self.trouble else "it waits for a rank or a message"
        text = f"rank {self.comm.rank} of {self.comm.size} on {platform.node()}: {self.name}: {why}"
        sys.stderr.write(f"mpiddl doctor: after {self.limit_s:g} s: {text}; the job ends.\n")
        sys.stderr.flush()
        time.sleep(1.0)  # so that the other ranks can say where they are
        self.comm.Abort(1)
        os._exit(1)


def _start(env: Mapping[str, str], limit_s: float) -> tuple[Any, list[Finding]]:
    """The world, or None where MPI cannot start; with what was found about library and launcher."""
    made = launch.promise(env)
    announced = f"{made.words} announced {made.size} ranks" if made.source else "none: one process alone"
    try:
        MPI = load_mpi()
        version = MPI.Get_library_version()
    except Exception as error:
        missing = Finding("MPI library", False, "none could be loaded", str(error))
        return None, [missing, Finding("launcher", None, announced, "find an MPI library first")]
    standard = "{}.{}".format(*MPI.Get_version())
    library = Finding("MPI library", True, f"{launch.library(version)[1]}, MPI {standard}")
    lines = [] if made.source else [_launch_line(env, version)]
    if not MPI.Is_initialized():
        trouble = launch.trouble(made, None, version)
        if trouble:
            return None, [library, Finding("launcher", False, *trouble)]
        trouble = environment_trouble(os.environ, version) or memory_trouble(os.environ, version)
        if trouble:
            return None, [library, Finding("launcher", None, announced), Finding("MPI start", False, *trouble), *lines]
    _mpi_init_waits_for_every_rank(MPI, made, limit_s)
    came = f"{announced}; MPI has {MPI.COMM_WORLD.size}"
    trouble = launch.trouble(made, MPI.COMM_WORLD.size, version)
    return MPI.COMM_WORLD, [library, Finding("launcher", not trouble, *(trouble or (came,))), *lines]


def _launch_line(env: Mapping[str, str], version: str) -> Finding:
    """What starts several ranks here: mpiexec may end before Python starts, and then nothing of mpiddl can say why."""
    family, library = launch.library(version)
    machine = this_machine(env, family)
    command = f"{machine.mpiddl} doctor"
    if not machine.mpiexec:
        remedy = f"pip install 'mpiddl[{family}]' brings one" if family != "other" else "load your site's MPI module"
        return Finding("launch line", None, f"got no mpiexec of {library} beside this Python or in the PATH", remedy)
    few, many = (launch_line(machine, ranks, command) for ranks in (max(2, machine.slots), 2 * machine.slots))
    differ = machine.family == "openmpi" and machine.slots > 1
    return Finding("launch line", True, few + (f"\nfor more than {machine.slots} ranks: {many}" if differ else ""))


def _mpi_init_waits_for_every_rank(MPI: Any, made: launch.Promise, limit_s: float) -> None:
    """MPI_Init, which does not return on a broken fabric or if a rank is missing.

    It keeps the interpreter lock, so that no thread can watch it: the timer of faulthandler, which needs no
    lock, ends the process and prints where it is; hence this function's name.
    """
    if MPI.Is_initialized():
        return
    faulthandler.dump_traceback_later(limit_s, exit=True)
    initialise(MPI, made)
    faulthandler.cancel_dump_traceback_later()


def _guarded(name: str, check: Any, *args: Any) -> Finding:
    """What a check found; a check that fails has found that."""
    try:
        return check(name, *args)
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {error}")


def _together(comm: MPI.Intracomm, name: str, probe: Any, env: Mapping[str, str], limit_s: float) -> Finding:
    """What a probe found on all ranks. What it made is freed, unless it failed somewhere: freeing hangs."""
    with Alarm(comm, name, limit_s) as alarm, ExitStack() as made:
        try:
            mine, failed = probe(name, comm, env, made), False
        except Exception as error:
            alarm.trouble = f"{type(error).__name__}: {error}"
            mine, failed = Finding(name, False, alarm.trouble), True
        findings, failures = zip(*comm.allgather((mine, failed)), strict=True)
        if any(failures):
            made.pop_all()
    return worst(findings)


def _versions(name: str, env: Mapping[str, str]) -> Finding:
    """The versions that figures and bug reports depend on."""
    found, missing = [f"mpiddl {__version__}", f"Python {platform.python_version()}"], []
    for package in ("numpy", "numba", "mpi4py"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    remedy = f"pip install {' '.join(missing)}" if missing else ""
    return Finding(name, not missing, ", ".join(found), remedy)


def _blas(name: str, env: Mapping[str, str]) -> Finding:
    """The library behind numpy's matrix products, and its threads before they are divided among the ranks."""
    import numpy  # noqa: F401  (threadpoolctl sees what is loaded)
    from threadpoolctl import threadpool_info

    libraries = [each for each in threadpool_info() if each["user_api"] == "blas"]
    if not libraries:
        return Finding(name, None, "none with threads", "pip install numpy (comes with OpenBLAS)")
    each = libraries[0]
    how = f"{each['num_threads']} threads, {each.get('threading_layer') or 'unknown'}"
    return Finding(name, True, f"{each['internal_api']} {each['version']} ({how})")


def _numba_cache(name: str, env: Mapping[str, str]) -> Finding:
    """Where numba keeps compiled kernels; a note if it is among temporary files."""
    try:
        from mpiddl.kernels import sgd

        folder = sgd.stats.cache_path  # type: ignore[attr-defined]
    except MpiddlError as error:
        return Finding(name, False, str(error))
    if os.path.dirname(folder) == kernel_cache.temporary_path():
        return Finding(name, None, f"{folder}, among temporary files", kernel_cache.REMEDY)
    writable = os.access(folder, os.W_OK)
    return Finding(name, writable, folder, "" if writable else kernel_cache.REMEDY)


def _free_space(name: str, env: Mapping[str, str]) -> Finding:
    """Free space where temporary files, shared memory and the run directory go."""
    temporary = env.get("TMPDIR") or tempfile.gettempdir()
    places = {"$TMPDIR": temporary, "/dev/shm": "/dev/shm", "here": os.getcwd()}
    free = {place: _free(path) for place, path in places.items()}
    short = [place for place, size in free.items() if size < LEAST_FREE]
    remedy = f"free at least {LEAST_FREE >> 20} MiB in {', '.join(short)}" if short else ""
    value = ", ".join(f"{place} {_at_least(size)}" for place, size in free.items())
    return Finding(name, None if short else True, value, remedy)


def _free(path: str) -> int:
    """Bytes free for this user; -1 where there is no such folder."""
    if not os.path.isdir(path):
        return -1
    usage = shutil.disk_usage(path)
    return usage.free if usage.total else sys.maxsize  # memory without a limit


def _at_least(size: int) -> str:
    """A size rounded down to a power of two, so that ranks that look a moment apart say the same."""
    if size < 0:
        return "is missing"
    power = max(size, 1).bit_length() - 1
    unit = min(power // 10, 4)
    return f"{1 << (power - 10 * unit)}+ {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


LOCAL = {"versions": _versions, "BLAS": _blas, "numba cache": _numba_cache, "free space": _free_space}
