"""Starting MPI: the library is looked at before ``MPI_Init`` is called, which may end the process and name no remedy."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from mpiddl import launch
from mpiddl.errors import CommError

FABRICS = "/sys/class/infiniband", "/sys/class/cxi", "/sys/class/gni"
"""Where Linux lists adapters for remote memory access: InfiniBand, RoCE, Omni-Path and EFA; Slingshot; Aries."""

WITHOUT_FABRIC = {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_btl": "^ofi,uct"}
"""For Open MPI 5.0 on a machine that has none of them: components that find no adapter there. osc/ucx complains at every
window; btl/ofi sleeps for a second in MPI_Init when it is closed; btl/uct may never return from it (open-mpi/ompi#14383)."""


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

    Raises
    ------
    CommError
        No MPI library; one that does not understand the launcher in ``env``; ranks that each believe to be alone.
    """
    MPI = load_mpi()
    promise, version = launch.promise(env), MPI.Get_library_version()
    if MPI.Is_finalized():
        _refuse("MPI: got a program that has finalized it, expected MPI in use; it cannot be started again")
    if not MPI.Is_initialized():
        _refuse(launch.check(promise, None, version) or _session_folder(env, version))
        initialise(MPI)
    _refuse(launch.check(promise, MPI.COMM_WORLD.size, version))
    return MPI


def initialise(MPI: Any) -> None:
    """``MPI_Init_thread``."""
    if not any(map(os.path.isdir, FABRICS)):
        for name, value in WITHOUT_FABRIC.items():
            os.environ.setdefault(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mpi4py guesses at a foreign launcher, which is known better here
        MPI.Init_thread(MPI.THREAD_MULTIPLE)


def _session_folder(env: Mapping[str, str], version: str) -> str | None:
    """Open MPI ends with a segmentation fault where it cannot make its session folder."""
    folder = env.get("TMPDIR") or "/tmp"
    if launch.library(version)[0] != launch.OPEN_MPI or os.access(folder, os.W_OK | os.X_OK):
        return None
    return f"TMPDIR: got {folder}, which cannot be written; expected a folder for Open MPI's session files: export TMPDIR=DIR"


def _refuse(trouble: str | None) -> None:
    if trouble:
        raise CommError(trouble)
