"""Starting MPI: the library is looked at before ``MPI_Init`` is called, which may end the process and name no remedy."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpiddl.errors import CommError
from mpiddl.machine import launch, threads

FABRICS = "/sys/class/infiniband", "/sys/class/cxi", "/sys/class/gni"
"""Where Linux lists adapters for remote memory access: InfiniBand, RoCE, Omni-Path and EFA; Slingshot; Aries."""

WITHOUT_FABRIC = {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_btl": "^ofi,uct"}
"""For Open MPI 5.0 on a machine that has none of them: components that find no adapter there. osc/ucx complains at every
window; btl/ofi sleeps for a second in MPI_Init when it is closed; btl/uct may never return from it (open-mpi/ompi#14383)."""

TEMPORARY = ("TMPDIR", "TEMP", "TMP")
"""The first of these that is set, if only to nothing, tells Open MPI where temporary files go."""

MEMORY = "/dev/shm"
"""Linux's memory file system, which MPICH shares memory in."""


def load_mpi() -> Any:
    """``mpi4py.MPI``, not yet initialised unless it was before.

    Raises
    ------
    CommError
        If no MPI library can be loaded; the message says where to get one.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc(initialize=False, finalize=True)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CommError(launch.no_mpi_message(error)) from None
    return MPI


def start_mpi(env: Mapping[str, str]) -> Any:
    """``mpi4py.MPI``, initialised with the highest thread level there is; the ranks that the launcher promised have come.

    A worker process of multiprocessing or joblib is a world of one rank.

    Raises
    ------
    CommError
        No MPI library; one that does not understand the launcher in ``env``; ranks that each believe to be alone; a worker
        process that shares the MPI of the rank that started it.
    """
    MPI = load_mpi()
    if multiprocessing.parent_process() is not None:
        env = _leave_launcher(MPI, env)
    promise, version = launch.promise(env), MPI.Get_library_version()
    if MPI.Is_finalized():
        _refuse("MPI: got a program that has finalized it, expected MPI in use; it cannot be started again")
    if not MPI.Is_initialized():
        _refuse(launch.check(promise, None, version))
        _refuse(": ".join(environment_trouble(os.environ, version) or ()))
        initialise(MPI, promise)
    _refuse(launch.check(promise, MPI.COMM_WORLD.size, version))
    return MPI


def _leave_launcher(MPI: Any, env: Mapping[str, str]) -> Mapping[str, str]:
    """Remove the launcher's variables from this process: they are meant for the rank that started it. Returns ``env`` without
    them."""
    made = launch.promise(os.environ)
    if MPI.Is_initialized() and made.size > 1:
        _refuse(f"MPI: got a worker process in which MPI is that of rank {made.rank}, expected a worker that starts without "
                'MPI; with multiprocessing: set_start_method("spawn") and no import of mpi4py at the top of the program; with '
                "joblib: its default backend, loky")
    for name in filter(launch.is_of_launcher, list(os.environ)):
        del os.environ[name]
    return {name: value for name, value in env.items() if not launch.is_of_launcher(name)}


def initialise(MPI: Any, promise: launch.Promise) -> None:
    """``MPI_Init_thread``; Open MPI's settings for this machine and the ranks of ``promise``, unless the user has set them.

    Open MPI reads them only here. They are removed again: a process that is started later, such as ``sbatch``, may lead to
    ranks on other machines.
    """
    wanted = {}
    if (promise.local_size or 1) > threads.launcher_cores():
        # Open MPI does this itself only if the slots of its hosts are fewer than the ranks; MPICH always yields. A rank that
        # waits without it keeps its core for a whole time slice, while the rank it waits for has none.
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if not any(map(os.path.isdir, FABRICS)):
        wanted |= WITHOUT_FABRIC
    with _set(wanted), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mpi4py guesses at a foreign launcher, which is known better here
        MPI.Init_thread(MPI.THREAD_MULTIPLE)


@contextmanager
def _set(wanted: Mapping[str, str]) -> Iterator[None]:
    """These variables for the length of a block, except those that the environment has already."""
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def environment_trouble(env: Mapping[str, str], version: str) -> tuple[str, str] | None:
    """What in ``env``, that of this process, Open MPI cannot start with, and the remedy; None if nothing.

    Without HOME ``MPI_Init`` ends the process. A process that no launcher started makes a session folder: if it cannot, it
    ends later with a segmentation fault. A launcher makes that of its ranks itself. MPICH needs neither.
    """
    if launch.library(version)[0] != "openmpi":
        return None
    if "HOME" not in env:
        home = os.path.expanduser("~")  # of the user database
        told = "HOME: got no value, expected a folder; Open MPI does not start without it"
        return told, f"export HOME={home if os.path.isabs(home) else '/tmp'}"
    if launch.promise(env).launcher != launch.NONE:
        return None
    name = next((name for name in TEMPORARY if name in env), TEMPORARY[0])
    folder = env.get(name, "/tmp")
    why = _cannot_be_written(folder)
    told = f"{name}: got {folder!r} ({why}), expected a folder that can be written, for Open MPI's session files"
    return (told, f"export {name}=DIR") if why else None


def memory_trouble(env: Mapping[str, str], version: str) -> tuple[str, str] | None:
    """Why MPICH may crash as it starts in a small memory file system, and the remedy; None if it does not.

    Seen with MPICH 5.0.2: with less than 16 MiB in all it does without. With more it takes 10 MiB for 2 ranks and up to 28 MiB
    for 4, and ends with a segmentation fault where that is not there.
    """
    ranks = launch.promise(env).local_size or 1
    try:
        found = os.statvfs(MEMORY)
    except OSError:
        return None
    mib, least, wanted = found.f_blocks * found.f_frsize / 2**20, 16, 16 + 4 * ranks
    if launch.library(version)[0] != "mpich" or ranks == 1 or not least <= mib < wanted:
        return None
    told = f"{MEMORY}: got {mib:.1f} MiB in all, expected {wanted} MiB or more for {ranks} ranks; MPICH may crash as it starts"
    return told, f"mount -o remount,size=1G {MEMORY}; in a container: docker run --shm-size 1g"


def _cannot_be_written(folder: str) -> str:
    """Why no folder can be made in ``folder``, which itself may have to be made first; empty if it can."""
    there = Path(folder)
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    try:
        os.rmdir(tempfile.mkdtemp(dir=there))
    except OSError as error:
        return error.strerror or str(error)
    return "" if folder else "an empty name"


def _refuse(trouble: str | None) -> None:
    if trouble:
        raise CommError(trouble)
