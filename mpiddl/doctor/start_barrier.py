"""Whether the barrier in which ranks start holds each of them back until all are there.

Ranks of Open MPI under ``srun --mpi=pmix`` end MPI_Init in a barrier of PMIx that Slurm carries out. In Slurm 22.05 its form
"tree", the one that is taken where no data travel, lets the ranks of a node go without those of the others: a rank then gets
messages while it is still in MPI_Init, and now and then crashes (open-mpi/ompi#12495). ``SLURM_PMIX_FENCE=ring`` holds them.

It is tried as it is: one rank comes late, and ranks of other nodes look how long they were held.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiddl.doctor.check_result import Finding
from mpiddl.machine import launch

if TYPE_CHECKING:
    from mpi4py import MPI

LATE_S = 1.0
"""How late a rank comes, and the others with it if all is well; a barrier of many nodes takes some milliseconds."""

MAPPED = Path("/proc/self/maps")
REMEDY = ("Open MPI may sometimes crash at the start: export SLURM_PMIX_FENCE=ring before srun, "
          "or PMIxCollFence=ring in your site's mpi.conf")  # fmt: skip


def probe(name: str, comm: MPI.Intracomm, env: Mapping[str, str], made: ExitStack) -> Finding:
    """Have a rank of the first node come late to a barrier of PMIx, then one of the last."""
    promised = launch.promise(env)
    by_slurm = promised.launcher == launch.SRUN and promised.protocol.startswith("pmix")
    fence = _fence(made) if by_slurm and promised.size == comm.size else None
    if not all(comm.allgather(fence is not None)):
        return Finding(name, True, "not tested: only srun --mpi=pmix has one")
    nodes = comm.allgather(env.get("SLURM_NODEID"))
    if fence is None or len(set(nodes)) == 1:
        return Finding(name, True, "not tested: all ranks are on one node")
    held = [_held(comm, fence, late, nodes) for late in (0, nodes.index(nodes[-1]))]
    if all(held):
        return Finding(name, True, "holds all ranks until the last one arrives")
    return Finding(name, None, "ranks of a node continue before ranks of other nodes arrive", REMEDY)


def _held(comm: MPI.Intracomm, fence: Callable[[], None], late: int, nodes: list[Any]) -> bool:
    """Whether this rank was held back until the rank ``late`` came, which need not hold for ranks of the same node."""
    comm.Barrier()
    if comm.rank == late:
        time.sleep(LATE_S)
    began = time.perf_counter()
    fence()
    return nodes[comm.rank] == nodes[late] or time.perf_counter() - began > LATE_S / 2


class _Process(ctypes.Structure):
    """``pmix_proc_t``."""

    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


def _fence(made: ExitStack) -> Callable[[], None] | None:
    """PMIx_Fence over all ranks of the job, in the library that MPI has loaded; None if it has loaded none."""
    mapped = MAPPED.read_text().splitlines() if MAPPED.exists() else []
    paths = {line.split()[-1] for line in mapped if "/libpmix.so" in line}
    if not paths:
        return None
    library = ctypes.CDLL(min(paths))
    nothing, none = ctypes.c_void_p(), ctypes.c_size_t()
    if library.PMIx_Init(ctypes.byref(_Process()), nothing, none):  # counted: MPI's own stays
        return None
    made.callback(library.PMIx_Finalize, nothing, none)

    def fence() -> None:
        if status := library.PMIx_Fence(nothing, none, nothing, none):
            raise RuntimeError(f"PMIx_Fence: status {status}")

    return fence
