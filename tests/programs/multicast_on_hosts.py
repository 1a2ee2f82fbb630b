"""Broadcasts and all-gathers over multicast on the hosts of a testbed: are they right? Rank 0 prints figures as JSON.

After the first ``TURNS`` each rank writes a file ``began-RANK`` into the current folder, and goes on when there is one called
``go``.
"""

import json
import os
import sys
import time

import numpy as np

from mpiddl.collectives import multicast
from mpiddl.collectives.calls import allgather, broadcast
from mpiddl.layout import block_bounds
from mpiddl.transport.mpi import connect

TURNS, SIZE = int(sys.argv[1]), 200_001

comm = connect()


def turn(number):
    root, whole = number % comm.size, np.arange(number, number + SIZE, dtype=np.int32)
    buf = whole.copy() if comm.rank == root else np.zeros_like(whole)
    broadcast(comm, buf, root, algorithm="multicast")
    found = np.zeros_like(whole)
    allgather(comm, whole[slice(*block_bounds(SIZE, comm.size, comm.rank))].copy(), found, algorithm="multicast")
    assert np.array_equal(buf, whole) and np.array_equal(found, whole), f"rank {comm.rank}, turn {number}"


for number in range(TURNS):
    turn(number)
works = multicast.works(comm)
link = multicast.hosts(comm).link if works else None
before = link.channel.figures() if link else {}
open(f"began-{comm.rank}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
for number in range(TURNS):
    turn(number)
after = comm.allgather(link.channel.figures() if link else {})
if comm.rank == 0:
    total = {name: sum(figures.get(name, 0) for figures in after) for name in {*after[0], "rejoined", "repairs"}}
    print(json.dumps({"works": works, "place": link.place if link else "", "figures": total}))
comm.Free()
