"""Where we are: what has to be the same for a measurement to count here."""

from __future__ import annotations

import platform
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from mpiddl.node.topology import Topology
from mpiddl.transport.comm import Comm
from mpiddl.tuning.table import Place, node_map


def place_of(comm: Comm, topology: Topology, env: Mapping[str, str]) -> Place:
    """This cluster, seen from this rank. Local."""
    return Place(cluster_name(env, socket.gethostname()), processor_name(), comm.library(), node_map(topology))


def cluster_name(env: Mapping[str, str], host: str) -> str:
    """Slurm's name of it, else a host's without what tells it from its neighbours.

    Examples
    --------
    >>> cluster_name({}, "node017.hpc.example.org"), cluster_name({"SLURM_CLUSTER_NAME": "juwels"}, "x1")
    ('node', 'juwels')
    """
    stem = re.sub(r"[-_]?\d+[-_a-z]?$", "", host.split(".")[0])
    return env.get("SLURM_CLUSTER_NAME") or stem or host


def processor_name(cpuinfo: str = "/proc/cpuinfo") -> str:
    """As the kernel calls it."""
    try:
        lines = Path(cpuinfo).read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def table_path(env: Mapping[str, str]) -> Path | None:
    """Where a user's table is: MPIDDL_TUNE, else mpiddl/tune.toml among the settings in the home folder; None without one."""
    if given := env.get("MPIDDL_TUNE"):
        return Path(given)
    try:
        base = Path(env["XDG_CONFIG_HOME"]) if env.get("XDG_CONFIG_HOME") else Path.home() / ".config"
    except RuntimeError:
        return None
    return base / "mpiddl" / "tune.toml"
