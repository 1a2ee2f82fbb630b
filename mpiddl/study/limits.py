"""The limits that collectives are measured against: what the memory of a node and the links between nodes can do.

Both are measured in the same run as the collectives. The wire's may also be given: bits a second on each link, of which
Ethernet, IP and TCP headers take 4.6 % at an MTU of 1,500 bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpiddl.memory import aligned_zeros
from mpiddl.node.topology import Neighbours
from mpiddl.study.interleaved import Contender
from mpiddl.transport.comm import Comm

HEADERS = 1.046


def free_memory() -> int:
    """Bytes of this host's memory that can still be used."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def memory_limit(local: Comm, n: int, dtype: np.dtype, streams: int) -> Contender:
    """All ranks of a node move ``n`` elements once between them: c = a + b (3 streams), or b = a (2)."""
    share = n // local.size
    first, second, third = (aligned_zeros(share, dtype) for _ in range(3))
    third[:] = 1

    def write() -> None:
        first.fill(1)
        second.fill(1)

    if streams == 3:
        return Contender(lambda: np.add(first, second, out=third), write=write)
    return Contender(lambda: np.copyto(third, first), write=write)


def wire_limit(near: Neighbours, nbytes: int) -> Contender:
    """Every node sends ``nbytes`` to the next one, and receives as many, by as many ranks as every node has."""
    streams, across = near.topology.least, near.across
    taking_part = near.local.rank < streams
    out, into = (np.zeros(max(1, nbytes // streams) if taking_part else 0, np.uint8) for _ in range(2))
    cuts = [slice(begin, begin + (1 << 20)) for begin in range(0, out.size, 1 << 20)]

    def stream() -> None:
        if not taking_part:
            return
        coming = [across.Irecv(into[cut], (across.rank - 1) % across.size, 1) for cut in cuts]
        leaving = [across.Isend(out[cut], (across.rank + 1) % across.size, 1) for cut in cuts]
        for request in (*coming, *leaving):
            request.Wait()

    return Contender(stream)
