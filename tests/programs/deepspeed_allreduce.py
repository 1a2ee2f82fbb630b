"""Races the all-reduce of the backend "mpiddl" against DeepSpeed's shared-memory all-reduce, on the ranks of one node.

    pip install deepspeed                                                   # and g++ and ninja, which build its operator
    mpiexec -n 2 python tests/programs/deepspeed_allreduce.py               # torch and mpiddl in the same environment

Three ways to sum a tensor: DeepSpeed's operator, a call of `mpiddl.Communicator`, and `torch.distributed.all_reduce`. Calls
alternate. Input is written anew before each call, and results are read. Medians.
"""

from __future__ import annotations

import os
import statistics
import time

import torch
import torch.distributed as dist
from mpi4py import MPI

import mpiddl.torch  # noqa: F401
from mpiddl import Communicator

SIZES = 10_000, 100_000, 1_000_000, 4_000_000, 16_000_000
WARM = 3


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("mpiddl")
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "LOCAL_SIZE": str(size)}  # names its shared memory
    deepspeed, comm = operator(rank, size), Communicator(MPI.COMM_WORLD)
    for n in SIZES:
        x = torch.ones(n)
        ways = {"DeepSpeed": deepspeed, "Communicator": lambda x: comm.Allreduce(MPI.IN_PLACE, x.numpy()),
                "all_reduce": dist.all_reduce}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(12 if n > 2_000_000 else 40):
            for name, call in ways.items():
                x.fill_(rank + 1.0)
                dist.barrier()
                began = time.perf_counter()
                call(x)
                total = float(x[0] + x[-1])
                times[name].append(time.perf_counter() - began)
                if total != size * (size + 1):
                    raise ValueError(f"{name}: got {total}, expected {size * (size + 1)}")
        found = {name: 1000 * statistics.median(each[WARM:]) for name, each in times.items()}
        if rank == 0:
            print(f"{n:9d} float32: " + ", ".join(f"{name} {ms:.3f} ms (factor {found['DeepSpeed'] / ms:.2f})"
                                                  for name, ms in found.items()), flush=True)
    dist.destroy_process_group()


def operator(rank: int, size: int):  # type: ignore[no-untyped-def]
    """DeepSpeed's all-reduce in place, built by rank 0 first."""
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    if rank == 0:
        ShareMemCommBuilder().load()
    dist.barrier()
    ShareMemCommBuilder().load().initialize(size, rank)
    dist.barrier()
    return torch.ops.deepspeed.inference_all_reduce_


if __name__ == "__main__":
    main()
