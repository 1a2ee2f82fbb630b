"""An all-reduce without copies: fill the input, call, read the result that all ranks of a node share.

    mpiexec -n 2 python examples/sum_in_place.py

Expect equal sums, and a fraction of the library's time where ranks share a node (3 to 10 times faster at 16 MiB on two cores).
"""

import time

import numpy as np

from mpiddl.collectives import TwoStep
from mpiddl.transport.mpi import connect

size, rounds = 4 << 20, 20  # float32 elements; repetitions of which the fastest counts

comm = connect()
reduction = TwoStep(comm, size, "float32")
reduction.input[:] = comm.rank + 1
theirs = np.zeros(size, np.float32)


def fastest(call) -> float:
    seconds = []
    for _ in range(rounds):
        comm.Barrier()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


ours_s = fastest(reduction)
library_s = fastest(lambda: comm.Allreduce(reduction.input, theirs))
if comm.rank == 0:
    print(f"sum {reduction.result[0]:g}, equal {np.array_equal(reduction.result, theirs)}")
    print(f"two-step {ours_s * 1e3:.2f} ms, library {library_s * 1e3:.2f} ms")
comm.Free()
