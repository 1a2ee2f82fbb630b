"""The line that starts several ranks on this machine, with the MPI library of this Python.

Open MPI's mpiexec refuses to start as root, or to start more ranks than the machine has cores, unless a flag allows it; the
flags are the same in Open MPI 4 and 5. MPICH's mpiexec (Hydra, which is Intel MPI's too) needs no flag. A mpiexec that
refuses ends before Python starts, so mpiddl tells the line beforehand. Nothing here starts MPI or another process: the files
beside mpiexec tell whose it is, quickly enough for ``--help``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mpiddl.machine.threads import cores

OPEN_MPI, MPICH, OTHER = "openmpi", "mpich", "other"  # as `mpiddl.machine.launch.library` names them
SRUN = "srun"
FILES = {OPEN_MPI: ("ompi_info", "prterun", "orterun"), MPICH: ("mpiexec.hydra", "hydra_pmi_proxy")}
NAMES = {OPEN_MPI: ("openmpi", "ompi", "prterun", "orterun"), MPICH: ("mpich", "hydra")}

_EXAMPLE = re.compile(r"mpiexec -n (\d+)( mpiddl\b)?")


class Machine(NamedTuple):
    """What the launch line depends on.

    ``mpiexec`` and ``mpiddl`` are the two commands as they are typed here, with their folder where the PATH does not lead
    to them; ``mpiexec`` is empty if there is none. ``slots`` is how many ranks Open MPI's mpiexec starts without a flag.
    """

    mpiexec: str
    family: str
    slots: int
    root: bool
    mpiddl: str = "mpiddl"


def launch_line(machine: Machine, ranks: int, command: str = "") -> str:
    """``command`` on so many ranks; without a command, the words before it.

    Examples
    --------
    >>> launch_line(Machine("mpiexec", "openmpi", 2, False), 4, "python program.py")
    'mpiexec --oversubscribe -n 4 python program.py'
    >>> launch_line(Machine("mpiexec", "openmpi", 8, True), 4)
    'mpiexec --allow-run-as-root -n 4'
    >>> launch_line(Machine("mpiexec", "mpich", 2, True), 4)
    'mpiexec -n 4'
    """
    words = [machine.mpiexec or "mpiexec"]
    if machine.family == OPEN_MPI:
        words += ["--allow-run-as-root"] * machine.root + ["--oversubscribe"] * (ranks > machine.slots)
    return " ".join([*words, "-n", str(ranks), *([command] if command else [])])


def this_machine(env: Mapping[str, str], library: str = "", python: str = sys.executable) -> Machine:
    """The mpiexec beside ``python``, else the first in the PATH, else srun; this process's cores, or its Slurm job's tasks.

    Parameters
    ----------
    env : mapping
        The environment, for ``PATH`` and Slurm's variables.
    library : str
        Family of the MPI library that was loaded, if that is known: an mpiexec of another one is passed over.
    """
    path, folder = env.get("PATH", os.defpath), str(Path(python).parent)
    found = (each for each in _launchers(path, folder) if _fits(each[1], library))
    mpiexec, family = next(found, (shutil.which("srun", path=path) or "", SRUN))
    own = shutil.which("mpiddl", path=folder)
    tasks = env.get("SLURM_NTASKS", "") if "SLURM_JOB_ID" in env else ""
    return Machine(
        _typed(mpiexec, path) if mpiexec else "",
        library if family == OTHER and library else family,
        int(tasks) if tasks.isdecimal() else len(cores().ids),
        os.geteuid() == 0,
        _typed(own, path) if own else f"{shlex.quote(python)} -m mpiddl",
    )


def in_examples(text: str, machine: Machine) -> str:
    """``text`` with each ``mpiexec -n N`` in it as it has to be typed here.

    Examples
    --------
    >>> in_examples("mpiexec -n 4 mpiddl tune", Machine("mpiexec", "openmpi", 2, False))
    'mpiexec --oversubscribe -n 4 mpiddl tune'
    """

    def here(found: re.Match[str]) -> str:
        return launch_line(machine, int(found[1])) + (f" {machine.mpiddl}" if found[2] else "")

    return _EXAMPLE.sub(here, text)


def more_ranks(env: Mapping[str, str], command: str) -> str:
    """The remedy for a ``command`` of mpiddl's that was started on one rank and needs several."""
    machine = this_machine(env)
    return f"start it with `{launch_line(machine, 2, f'{machine.mpiddl} {command}')}`"


def family_of(mpiexec: str) -> str:
    """Whose mpiexec it is, by the name of the file that it leads to, or by the files in the same folder."""
    file = Path(os.path.realpath(mpiexec))
    by_name = [family for family, names in NAMES.items() if any(name in file.name for name in names)]
    beside = [family for family, names in FILES.items() if any((file.parent / name).exists() for name in names)]
    found = by_name or beside
    return found[0] if len(found) == 1 else OTHER


def _launchers(path: str, first: str) -> Iterator[tuple[str, str]]:
    """Each mpiexec in the folder ``first`` and in those of ``path``, with its family."""
    for folder in [first, *path.split(os.pathsep)]:
        file = shutil.which("mpiexec", path=folder)
        if file:
            yield file, family_of(file)


def _fits(family: str, library: str) -> bool:
    return not library or family == OTHER or (family == OPEN_MPI) == (library == OPEN_MPI)


def _typed(file: str, path: str) -> str:
    """The name alone where the PATH leads to this file, else the whole path."""
    name = os.path.basename(file)
    first = shutil.which(name, path=path)
    return name if first and os.path.samefile(first, file) else shlex.quote(file)
