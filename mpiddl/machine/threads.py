"""How many threads a rank may use: its share of the cores that the ranks of a node may run on.

Open MPI binds every rank to a core (two ranks) or a NUMA domain (more) by default, srun often to its CPUs,
MPICH to nothing: so no rank alone knows the node. The cores of the node are the union of what its ranks may
run on; whoever has a communicator gathers them, and everything here stays a pure function of what was
gathered. The two hardware threads of a core share its floating-point units, so that a core counts once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

NO_ENV: Mapping[str, str] = MappingProxyType({})
BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
NUMBA_VARIABLES = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS")


class Cores(NamedTuple):
    """What one process may run on.

    ``ids`` are the cores of its affinity mask, each named by its first hardware thread; ``quota`` the CPU
    seconds a second that its control groups grant, None for no limit.
    """

    ids: frozenset[int]
    quota: float | None


class Threads(NamedTuple):
    """Threads of one rank, for BLAS and for numba, and who decided: a flag, a variable, or the cores."""

    blas: int
    numba: int
    source: str


def cores(root: str | Path = "/") -> Cores:
    """What this process may run on: its mask now, its `quota` as it was when first asked.

    Parameters
    ----------
    root : path
        Where ``proc`` and ``sys`` are found; for tests.
    """
    root = Path(root)
    mask = os.sched_getaffinity(0)
    return Cores(frozenset(_first_sibling(root, cpu) for cpu in mask), quota(root))


def launcher_cores(root: str | Path = "/") -> int:
    """Cores that the ranks of this node may use together, as one rank alone can tell, before MPI is started.

    The launcher may have bound this rank to one core, but not its own process, which is the rank's parent.
    """
    mask = os.sched_getaffinity(0)
    with suppress(ProcessLookupError):
        mask = mask | os.sched_getaffinity(os.getppid())
    ids = frozenset(_first_sibling(Path(root), cpu) for cpu in mask)
    return node_cores([Cores(ids, quota(root))])


@cache
def _first_sibling(root: Path, cpu: int) -> int:
    """The lowest hardware thread of the core of ``cpu``; ``cpu`` itself where the kernel does not tell."""
    text = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    first = text.replace("-", ",").partition(",")[0]
    return int(first) if first.isdecimal() else cpu


@cache
def quota(root: str | Path = "/") -> float | None:
    """CPU seconds a second that control groups of either version grant this process when first asked; None for no limit.

    A group is limited by each group above it too, so that the least of the path counts.
    """
    root = Path(root)
    limits = [limit for folder in _groups(root) for limit in (_limit_v2(folder), _limit_v1(folder)) if limit]
    return min(limits, default=None)


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's CPU control group and of every group above it.

    In a container the path that /proc tells may be the host's, which is not there: then only the top of the
    mount, which is the container's own group, has something to read.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            top = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            top = root / "sys/fs/cgroup/cpu"
        else:
            continue
        folder = top / path.lstrip("/")
        yield from (folder, *folder.parents[: len(folder.parts) - len(top.parts)])


def _limit_v2(folder: Path) -> float | None:
    """The limit in ``cpu.max``: microseconds granted a period ("max" for no limit), and the period."""
    granted, _, period = _read(folder / "cpu.max").partition(" ")
    return int(granted) / int(period) if granted.isdecimal() and period.isdecimal() else None


def _limit_v1(folder: Path) -> float | None:
    """The limit in ``cpu.cfs_quota_us``, -1 for none, over ``cpu.cfs_period_us``."""
    granted, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return int(granted) / int(period) if granted.isdecimal() and period.isdecimal() else None


def _read(path: Path) -> str:
    """A small file of the kernel's; empty where it is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def node_cores(ranks: Iterable[Cores]) -> int:
    """Cores that the ranks of one node may use together.

    Parameters
    ----------
    ranks : iterable of Cores
        What `cores` returned on each rank of the node, gathered by the caller.

    Examples
    --------
    >>> node_cores([Cores(frozenset({0}), None), Cores(frozenset({1}), None)])
    2
    """
    masks, quotas = zip(*ranks, strict=True)
    count = len(frozenset().union(*masks))
    # Ranks of a container share one group: their quotas are one and the same, and must not be added up.
    return count if None in quotas else max(1, min(count, int(max(quotas))))


def threads_per_rank(
    cores_on_node: int, local_ranks: int, wanted: int | None = None, env: Mapping[str, str] = NO_ENV
) -> Threads:
    """Threads that each rank of a node should use: cores / ranks, at least 1, unless the user says otherwise.

    Parameters
    ----------
    cores_on_node : int
        From `node_cores`.
    local_ranks : int
        Ranks on the node.
    wanted : int, optional
        The user's flag; wins over everything.
    env : mapping
        Where ``OPENBLAS_NUM_THREADS``, ``MKL_NUM_THREADS`` (for BLAS), ``NUMBA_NUM_THREADS`` (for numba) and
        then ``OMP_NUM_THREADS`` (for both) are looked up.

    Examples
    --------
    >>> threads_per_rank(16, 4)
    Threads(blas=4, numba=4, source='16 cores / 4 ranks')
    """
    if wanted is not None:
        return Threads(wanted, wanted, "flag")
    share = max(1, cores_on_node // max(1, local_ranks))
    (blas, blas_by), (numba, numba_by) = _asked(env, BLAS_VARIABLES), _asked(env, NUMBA_VARIABLES)
    said = " ".join(dict.fromkeys(filter(None, (blas_by, numba_by))))
    return Threads(blas or share, numba or share, said or f"{cores_on_node} cores / {local_ranks} ranks")


def _asked(env: Mapping[str, str], names: Iterable[str]) -> tuple[int, str]:
    """The first of the variables that is set to a number, with its name; 0 if none is."""
    for name in names:
        # OMP_NUM_THREADS may list one number for each level of nesting.
        first = env.get(name, "").partition(",")[0].strip()
        if first.isdecimal() and int(first):
            return int(first), name
    return 0, ""


def warning(cores_on_node: int, local_ranks: int, threads: Threads) -> str | None:
    """A sentence for the user if the ranks of a node run more threads than it has cores; else None.

    Ranks with one thread each are left to the final table (`mpiddl.machine.rank_count`), which says what they cost.
    """
    most = max(threads.blas, threads.numba)
    if local_ranks * most <= cores_on_node or most == 1:
        return None
    return (
        f"threads: {local_ranks} ranks x {most} threads ({threads.source}) on {cores_on_node} cores: they share "
        "cores, and waiting ranks slow down the others; use fewer threads in each rank"
    )


def apply(threads: Threads) -> ExitStack:
    """Set the threads of the BLAS and OpenMP libraries that are loaded, and of numba if it is.

    Returns
    -------
    contextlib.ExitStack
        Closing it, or leaving its ``with`` block, restores what was set before; left alone, it stays.
    """
    undo = ExitStack()
    numba = sys.modules.get("numba")
    if numba is not None:  # first, since it may load an OpenMP library
        undo.callback(numba.set_num_threads, numba.get_num_threads())
        # numba refuses more than it counted when it was imported: a single one on a rank bound to one core.
        numba.set_num_threads(min(threads.numba, numba.config.NUMBA_NUM_THREADS))
    limits = {"blas": threads.blas, "openmp": max(threads.blas, threads.numba)}
    undo.callback(_libraries(len(sys.modules)).limit(limits=limits).restore_original_limits)
    return undo


@lru_cache(1)
def _libraries(modules: int) -> Any:
    """The BLAS and OpenMP libraries that are loaded, looked for anew (2 ms) when more ``modules`` are."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
