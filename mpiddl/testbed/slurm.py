"""Slurm for real on the hosts: slurmctld on the login node, slurmd on each host, munge for both. No systemd, needs root.

Known with Slurm 22.05 of Debian 12: slurmd wants a cgroup plugin named though it may use none, an empty spool folder,
and PMIx's own authentication; its PMIx plugin opens the unversioned library that libpmix-dev brings. The plugin's barrier of
the form "tree", which it takes where no data travel, holds nobody back: each node takes itself for the root and lets its ranks
go. Then a rank of Open MPI gets messages while it is still in MPI_Init, and now and then crashes (open-mpi/ompi#12495).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from mpiddl.testbed.cluster import Cluster
from mpiddl.testbed.hosts import SHARED
from mpiddl.testbed.plan import LOGIN
from mpiddl.testbed.rights import TestbedError, with_tools

PACKAGES = "slurm-wlm munge slurm-wlm-basic-plugins slurm-wlm-plugins libpmix2 libpmix-dev"
FOLDER = SHARED / "slurm"
CONFIG = FOLDER / "slurm.conf"
_READY_S = 120.0
_NOT_OURS = ("SLURM_", "PMIX_", "HYDRA_", "PRTE_MCA_plm_")

_CONFIG = """ClusterName=testbed
SlurmctldHost=login
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TmpFS=/run
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
SlurmdTimeout=30
InactiveLimit=0
KillWait=5
PropagateResourceLimits=NONE
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
NodeName=h[1-{hosts}] CPUs=4 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""

_MUNGE = """set -e
mkdir -p /run/munge /run/slurmd && chown munge:munge /run/munge && chmod 755 /run/munge
exec setpriv --reuid=munge --regid=munge --clear-groups munged --force --socket=/run/munge/munge.socket.2 \\
    --log-file=/run/munge/munged.log --pid-file=/run/munge/munged.pid --seed-file=/run/munge/munged.seed"""


def check(env: Mapping[str, str] = os.environ) -> None:
    """`TestbedError` where Slurm cannot be started."""
    path = with_tools(env)["PATH"]
    missing = [name for name in ("slurmctld", "slurmd", "munged", "srun") if not shutil.which(name, path=path)]
    if missing:
        raise TestbedError(f"slurm: missing programs: {', '.join(missing)}; install them on Debian: "
                           f"apt install --no-install-recommends {PACKAGES}")
    if os.geteuid():
        raise TestbedError("slurm: got an ordinary user, expected root, which the option --slurm needs")


def start(cluster: Cluster, env: Mapping[str, str] = os.environ) -> None:
    """Start Slurm on a cluster; returns when every host is idle, waiting for jobs."""
    folder = cluster.shared / FOLDER.name
    (folder / "state").mkdir(parents=True)
    (folder / CONFIG.name).write_text(_CONFIG.format(folder=FOLDER, hosts=cluster.plan.hosts))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    (folder / "mpi.conf").write_text("PMIxCollFence=ring\n")
    own = environment(env)
    cluster.call(["/bin/sh", "-c", _MUNGE], own)
    cluster.call(["slurmctld", "-c"], own)
    for name in cluster.plan.names:
        start_node(cluster, name, env)
    _wait(cluster, own)


def start_node(cluster: Cluster, name: str, env: Mapping[str, str] = os.environ) -> None:
    """Start Slurm's daemons on one host, which may have been booted."""
    own = environment(env) | {"PMIX_MCA_gds": "hash", "PMIX_MCA_psec": "native"}
    cluster.call(["/bin/sh", "-c", _MUNGE], own, name)
    cluster.call(["slurmd", "-N", name], own, name)


def is_on(cluster: Cluster) -> bool:
    """True if Slurm was started on it."""
    return (cluster.shared / FOLDER.name).is_dir()


def environment(env: Mapping[str, str], prefix: str = sys.prefix) -> dict[str, str]:
    """``env`` for Slurm's commands: mpiexec inside a job is to start its daemons with srun, not over the network."""
    kept = {name: value for name, value in env.items() if not name.startswith(_NOT_OURS)}
    if Path(prefix, "bin", "prterun").exists():  # Slurm's PMIx and that of Open MPI's wheel each find their own files
        kept["PMIX_PREFIX"] = prefix
    return kept | {"SLURM_CONF": str(CONFIG)}


def _wait(cluster: Cluster, env: Mapping[str, str]) -> None:
    until = time.monotonic() + _READY_S
    while (states := cluster.call(["sinfo", "-hNo", "%T"], env, LOGIN).split()).count("idle") < cluster.plan.hosts:
        if time.monotonic() > until:
            raise TestbedError(f"slurm: after {_READY_S:g} s the states of the hosts are {', '.join(states)}, expected all "
                               "idle")
        time.sleep(0.1)
