"""Races the all-reduce of the backend "mpiddl" against DeepSpeed's shared-memory all-reduce, on the ranks of one node.

    pip install deepspeed                                                   # and g++ and ninja, which build its operator
    mpiexec -n 2 python tests/programs/deepspeed_allreduce.py               # torch and mpiddl in the same environment

Calls alternate. Input is written anew before each call, and results are read. Medians.
"""

from __future__ import annotations

import os
import statistics
import time

import torch
import torch.distributed as dist

import mpiddl.torch  # noqa: F401

SIZES = 10_000, 100_000, 1_000_000, 4_000_000, 16_000_000
WARM = 3


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("mpiddl")
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "LOCAL_SIZE": str(size)}  # names its shared memory
    deepspeed = operator(rank, size)
    for n in SIZES:
        x, times = torch.ones(n), {"deepspeed": list[float](), "mpiddl": list[float]()}
        for _ in range(12 if n > 2_000_000 else 40):
            for name, call in (("deepspeed", deepspeed), ("mpiddl", dist.all_reduce)):
                x.fill_(rank + 1.0)
                dist.barrier()
                began = time.perf_counter()
                call(x)
                found = float(x[0] + x[-1])
                times[name].append(time.perf_counter() - began)
                if found != size * (size + 1):
                    raise ValueError(f"{name}: got {found}, expected {size * (size + 1)}")
        theirs, ours = (1000 * statistics.median(each[WARM:]) for each in times.values())
        if rank == 0:
            print(f"{n:9d} float32: DeepSpeed {theirs:7.3f} ms, mpiddl {ours:7.3f} ms, factor {theirs / ours:.2f}", flush=True)
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
