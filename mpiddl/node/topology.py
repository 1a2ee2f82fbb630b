"""Where the ranks are: nodes, leaders, and the ranks of equal local rank across nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpiddl.errors import CommError
from mpiddl.transport.comm import Comm


@dataclass(frozen=True)
class Topology:
    """Which rank is on which node; integers only.

    Parameters
    ----------
    homes : sequence of int
        For each rank a number that it shares with the ranks of its node, and with no others.

    Examples
    --------
    >>> uneven = Topology([0, 0, 2, 3])
    >>> uneven.nodes, uneven.leaders, uneven.least
    (((0, 1), (2,), (3,)), (0, 2, 3), 1)
    >>> Topology([7, 9, 7, 9]).across(1)
    (2, 3)
    """

    homes: Sequence[int]

    @property
    def size(self) -> int:
        return len(self.homes)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, nodes in the order of their lowest rank."""
        order = dict.fromkeys(self.homes)
        return tuple(tuple(rank for rank, its in enumerate(self.homes) if its == home) for home in order)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The lowest rank of each node."""
        return tuple(node[0] for node in self.nodes)

    @property
    def least(self) -> int:
        """Ranks of the smallest node: so many local ranks there are on every node."""
        return min(map(len, self.nodes))

    def node(self, rank: int) -> int:
        """Which node ``rank`` is on."""
        return next(number for number, node in enumerate(self.nodes) if rank in node)

    def local(self, rank: int) -> int:
        """Where ``rank`` stands on its node, from 0."""
        return self.nodes[self.node(rank)].index(rank)

    def across(self, local: int) -> tuple[int, ...]:
        """The ranks that stand at ``local`` on their nodes; one of every node if ``local < least``."""
        return tuple(node[local] for node in self.nodes if len(node) > local)

    @cached_property
    def ring(self) -> tuple[int, ...]:
        """All ranks, node by node: a ring in this order leaves each node once."""
        return tuple(rank for node in self.nodes for rank in node)

    def __str__(self) -> str:
        counts = [len(node) for node in self.nodes]
        if len(set(counts)) > 1:
            return f"{self.size} ranks on {len(counts)} nodes ({'+'.join(map(str, counts))})"
        return f"{len(counts)} node{'s' * (len(counts) > 1)} x {counts[0]} rank{'s' * (counts[0] > 1)}"


class Neighbours:
    """The communicators that follow from a topology; made once for each communicator by `neighbours`.

    Attributes
    ----------
    topology : Topology
    local : Comm
        The ranks of this rank's node, in rank order.
    across : Comm
        The ranks of equal local rank, in the order of their nodes.
    ring : Comm
        All ranks, node by node.
    """

    def __init__(self, comm: Comm):
        self.topology = Topology(comm.nodes())
        node, local = self.topology.node(comm.rank), self.topology.local(comm.rank)
        self.local = comm.Create(self.topology.nodes[node])
        self.across = comm.Create(self.topology.across(local))
        self.ring = comm.Create(self.topology.ring)


def neighbours(comm: Comm) -> Neighbours:
    """Nodes, leaders and cross communicators of ``comm``; they live as long as it does.

    Communication
    -------------
    Collective over ``comm`` at the first call: a barrier, four splits, a broadcast inside nodes and an all-gather of
    one integer. None afterwards.
    """
    if comm.freed:
        raise CommError("comm: got a freed communicator, expected a communicator that was not freed")
    return comm.kept("neighbours", lambda: Neighbours(comm))
