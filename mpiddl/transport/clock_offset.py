"""Clocks of different ranks on one scale, so that arrivals can be compared.

Rank 0 answers each rank in turn with its clock; the answer is taken to lie in the middle of the shortest of several round
trips, so the error is at most half of that round trip (microseconds inside a node, tens across). Ranks of one node share the
kernel's monotonic clock and come out within that error of zero.

Cost: 2 * ROUNDS messages of 8 bytes a rank, one rank after the other, once a run.
Source: Cristian 1989, "Probabilistic clock synchronization", doi:10.1007/BF01784024.
"""

from __future__ import annotations

import numpy as np

from mpiddl.transport.comm import Comm

ROUNDS = 8  # the shortest of eight round trips is near the least there is; more costs start-up time on many ranks


def clock_offset(comm: Comm) -> float:
    """Seconds to add to this rank's `now()` to get rank 0's. Collective."""
    cell = np.zeros(1)
    if comm.rank == 0:
        for other in range(1, comm.size):
            for _ in range(ROUNDS):
                comm.Recv(cell, other, 0)
                cell[0] = comm.now()
                comm.Send(cell, other, 0)
        return 0.0
    best, offset = float("inf"), 0.0
    for _ in range(ROUNDS):
        asked = comm.now()
        comm.Send(cell, 0, 0)
        comm.Recv(cell, 0, 0)
        answered = comm.now()
        if answered - asked < best:
            best, offset = answered - asked, float(cell[0]) - (asked + answered) / 2
    return offset
