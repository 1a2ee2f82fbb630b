"""What the hosts' links carry while ranks train, by the kernel's counters; what is measured between steps is left out.

The payload that a strategy sends is counted once, where it is sent (`mpiddl.transport.meter.Meter`). Links carry more: headers,
acknowledgements, what the MPI library sends inside its collectives, and copies where it sends one thing to several hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpiddl.machine.link_counters import Link, link_bytes
from mpiddl.transport.comm import Comm

NONE = Link(0, 0, 0, 0)


class Traffic:
    """Counts from when it is made. The lowest rank of each host reads the counters, if there are several hosts.

    Parameters
    ----------
    comm : Comm
        Apart from the strategy's.
    read : callable
        The counters of this host's link.

    Communication
    -------------
    Collective: which rank is on which node; between real nodes two barriers.
    """

    def __init__(self, comm: Comm, read: Callable[[], Link] = link_bytes):
        homes = comm.nodes()
        self._comm, self._read = comm, read
        self.counted = comm.processes and len(set(homes)) > 1
        self._mine = self.counted and homes.index(homes[comm.rank]) == comm.rank
        self._apart = NONE
        self._since = self._together()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is carried in the block is no part of training. Collective; between real nodes four barriers."""
        before = self._together()
        yield
        self._apart = Link(*(a + b for a, b in zip(self._apart, self._together().since(before), strict=True)))

    def hosts(self) -> list[dict[str, int]]:
        """For each host the bytes sent and received so far, and the packets sent; none if that is not counted. Collective."""
        mine = self._together().since(self._since).since(self._apart)
        found = [Link(*host) for host in self._comm.allgather(tuple(mine) if self._mine else None) if host]
        return [{"sent": host.sent_bytes, "received": host.received_bytes, "packets": host.sent_packets} for host in found]

    def _together(self) -> Link:
        """The counters while all ranks are here: a host that went on would send what others, who read later, count before."""
        if not self.counted:
            return NONE
        self._comm.Barrier()
        read = self._read() if self._mine else NONE
        self._comm.Barrier()
        return read
