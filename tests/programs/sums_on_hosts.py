"""The collectives over the hosts of a testbed: are the results right, and what did each link carry? Rank 0 prints JSON."""

import json
import sys

import numpy as np

from mpiddl.collectives import TwoStep, calls
from mpiddl.layout import block_bounds
from mpiddl.node.topology import neighbours
from mpiddl.testbed import link_bytes
from mpiddl.transport.mpi import connect
from mpiddl.tuning.rule import OVER_VERBS

SIZE = int(sys.argv[1])  # float32 elements

comm = connect()
mine = np.random.default_rng(comm.rank).integers(0, 9, SIZE).astype(np.float32)
wanted = sum(np.random.default_rng(rank).integers(0, 9, SIZE).astype(np.float32) for rank in range(comm.size))


def in_place(leader):
    reduction = TwoStep(comm, SIZE, np.float32, leader=leader)
    reduction.input[:] = mine
    return lambda total: np.copyto(total, reduction())


def scattered(total):
    begin, end = block_bounds(SIZE, comm.size, comm.rank)
    block = np.zeros(end - begin, np.float32)
    calls.reduce_scatter(comm, mine, block)
    total[:] = wanted
    total[begin:end] = block


def gathered(total):
    begin, end = block_bounds(SIZE, comm.size, comm.rank)
    calls.allgather(comm, wanted[begin:end].copy(), total)


def broadcast(total):
    total[:] = wanted if comm.rank == comm.size - 1 else 0
    calls.broadcast(comm, total, comm.size - 1)


ways = {name: lambda total, name=name: calls.allreduce(comm, mine, total, algorithm=name)
        for name in calls.ALLREDUCE if name not in OVER_VERBS}
ways |= {"in place": in_place(False), "in place, leader": in_place(True)}
ways |= {"reduce-scatter": scattered, "allgather": gathered, "broadcast": broadcast}
found = {"topology": str(neighbours(comm).topology), "links": {}}
for name, way in ways.items():
    total = np.zeros_like(mine)
    way(total)  # connections are made at the first call
    comm.Barrier()
    before = link_bytes().sent_bytes
    way(total)
    comm.Barrier()
    found["links"][name] = max(comm.allgather(link_bytes().sent_bytes - before))
    if not all(comm.allgather(np.array_equal(total, wanted))):
        sys.exit(f"{name}: a wrong sum")
if comm.rank == 0:
    print(json.dumps(found))
comm.Free()
