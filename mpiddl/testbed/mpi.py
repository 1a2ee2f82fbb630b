"""mpiexec over the hosts: which one, how it is told where ranks go, and what it needs in its environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpiddl.errors import UsageError
from mpiddl.testbed.hosts import SHARED, TMPDIR
from mpiddl.testbed.rights import TestbedError

OPEN_MPI, MPICH = "openmpi", "mpich"
FAMILIES = (OPEN_MPI, MPICH)

# What an mpiexec or srun around us told this process about itself; a job that we start must not take it for its own.
_OUTER_JOB = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "PRTE_LAUNCHED", "MPI_LOCAL", "HYDRA_", "HYDI_", "SLURM_")

SESSIONS = "PRTE_MCA_prte_local_tmpdir_base"
"""Where Open MPI's mpiexec keeps a folder named by its process number."""

# In /run, of which every host has its own; on the disk that clusters share, in each of which process numbers begin anew.
_ELSEWHERE = ("XDG_RUNTIME_DIR", SESSIONS)

_AS_ROOT = [f"{part}_ALLOW_RUN_AS_ROOT{twice}" for part in ("OMPI", "PRTE") for twice in ("", "_CONFIRM")]
# All hosts share this machine's cores: a rank that waits has to leave its core to the others, none may be bound.
# Without ^ucx, one-sided windows print a harmless error. Daemons are started from the login node, never by each other.
_ANYHOW = dict.fromkeys(_AS_ROOT, "1") | {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_btl": "^ofi,uct"}
_CROWDED = {"OMPI_MCA_mpi_yield_when_idle": "1", "PRTE_MCA_hwloc_default_binding_policy": "none"}
_OPEN_MPI = _ANYHOW | _CROWDED | {
    "PRTE_MCA_plm_ssh_agent": str(SHARED / "agent"),
    "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
}
_MPICH = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(SHARED / "agent")}


class Launcher(NamedTuple):
    """An mpiexec, and whose it is."""

    path: str
    family: str


def find_launcher(family: str | None, env: Mapping[str, str], python: str = sys.executable) -> Launcher:
    """The mpiexec beside ``python``, else the first on the PATH; of ``family`` if one is named."""
    if family is not None and family not in FAMILIES:
        raise UsageError(f"mpi: got {family!r}, expected {' or '.join(FAMILIES)}")
    found: list[Launcher] = []
    for folder in [str(Path(python).parent), *env.get("PATH", os.defpath).split(os.pathsep)]:
        path = shutil.which("mpiexec", path=folder)
        if path and path not in [each.path for each in found]:
            found.append(Launcher(path, _family(path, env)))
            if found[-1].family in ([family] if family else FAMILIES):
                return found[-1]
    raise TestbedError(_none_found(family, found))


def _none_found(family: str | None, found: Sequence[Launcher]) -> str:
    wanted = family or " or ".join(FAMILIES)
    came = "; ".join(f"{path} is of {other}" for path, other in found) or "no mpiexec beside this Python or on the PATH"
    return f"mpi: expected an mpiexec of {wanted}; {came}. `pip install mpiddl[{family or OPEN_MPI}]` brings one"


def _family(path: str, env: Mapping[str, str]) -> str:
    """Whose mpiexec it is, by its own words."""
    said = subprocess.run([path, "--version"], env={**env, **_OPEN_MPI}, capture_output=True, text=True, timeout=60)
    text = said.stdout + said.stderr
    names = {"Open MPI": OPEN_MPI, "OpenRTE": OPEN_MPI, "PRRTE": OPEN_MPI, "HYDRA": MPICH}
    return next((family for name, family in names.items() if name in text), "another MPI")


def command(launcher: Launcher, ranks: Sequence[int], program: Sequence[str], arguments: Sequence[str] = ()) -> list[str]:
    """``program`` on one rank for each entry of ``ranks``, which is the rank's host, from 0."""
    size = ["-n", str(len(ranks))]
    if launcher.family == OPEN_MPI:
        each = {host: ranks.count(host) for host in sorted(set(ranks))}
        placed = ["--host", ",".join(f"h{host + 1}:{count}" for host, count in each.items())]
        by = "slot" if list(ranks) == sorted(ranks) else "node"
        return [launcher.path, *placed, *size, "--map-by", f"{by}:OVERSUBSCRIBE", *arguments, *program]
    used = sorted(set(ranks))
    placed = ["-hosts", ",".join(f"h{host + 1}:{ranks.count(host)}" for host in used)]
    if list(ranks) != sorted(ranks):
        placed += ["-rankmap", f"(vector,{','.join(str(used.index(host)) for host in ranks)})"]
    return [launcher.path, *placed, *size, *arguments, *program]


def willing(env: Mapping[str, str], crowded: bool) -> dict[str, str]:
    """``env`` with which Open MPI starts on this machine, by root, too, and ``crowded``, with more ranks than cores."""
    more = _CROWDED | {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"} if crowded else {}
    return _ANYHOW | more | {"HOME": "/tmp"} | dict(env)  # without a home it does not start


def environment(launcher: Launcher | None, env: Mapping[str, str], python: str = sys.executable) -> dict[str, str]:
    """``env`` for a program on the hosts; what the caller has set stays as it is."""
    kept = {name: value for name, value in env.items() if not name.startswith(_OUTER_JOB) and name not in _ELSEWHERE}
    kept["TMPDIR"] = TMPDIR
    kept.setdefault("HOME", "/tmp")  # Open MPI does not start without one
    beside = str(Path(python).parent)
    if launcher is None or str(Path(launcher.path).parent) == beside:  # else whoever set the PATH knows which Python fits
        kept["PATH"] = os.pathsep.join([beside, kept.get("PATH", os.defpath)])
    return _OPEN_MPI | _MPICH | kept  # each ignores the other's
