"""Where the workers of a parameter server push to and pull from: shards that ranks serve beside their own work."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpiddl.collectives.base import block_bounds
from mpiddl.strategies.base import Replica
from mpiddl.strategies.ledger import Ledger
from mpiddl.strategies.shard import Shard
from mpiddl.topology import neighbours

PAUSE_S = 0.001
"""Between two looks of a worker that waits for the others to meet: they compute."""


class Store:
    """The shards of a model, one for each of the last ``rule.servers`` ranks, and the ledger, which the first of these keeps.

    Parameters
    ----------
    comm : Comm
        Of all workers; each of them works, and those that serve serve as well.
    rule : ParameterServer
    replica : Replica
    saved : dict or None
        This rank's shard as `saved` gave it, to go on from.

    Communication
    -------------
    Collective over ``comm``: shared memory for each node, a barrier.
    """

    def __init__(self, comm: Any, rule: Any, replica: Replica, saved: dict[str, Any] | None):
        self._comm, self.freed = comm, False
        self._near = neighbours(comm)
        self.servers = range(comm.size - rule.servers, comm.size)
        self.spans = [block_bounds(replica.params.size, rule.servers, number) for number in range(rule.servers)]
        book = 8 * Ledger.WORDS
        mine = comm.rank - self.servers[0]
        size = Shard.size_bytes(rule, replica, comm.size, self.spans[mine]) if mine >= 0 else 0
        self._memory = self._near.local.share(size + book * (mine == 0))
        segments = dict(zip(self._near.topology.nodes[self._near.topology.node(comm.rank)], self._memory.segments, strict=True))
        self.shards = [Shard(comm, rule, replica, span, segments[server][book * (number == 0) :])
                       for number, (server, span) in enumerate(zip(self.servers, self.spans, strict=True))]
        self.ledger = Ledger(comm, segments[self.servers[0]][:book].view(np.int64))
        self.own = self.shards[mine] if mine >= 0 else None
        if self.own:
            self.own.begin(saved)
            if mine == 0:
                self.ledger.begin(self.own.guard.changes, saved["met"] if saved else 0)
        comm.Barrier()

    def saved(self) -> dict[str, Any] | None:
        """What this rank serves, as the state of a strategy; views, of this moment."""
        return {**self.own.saved(), "met": self.ledger.met} if self.own else None

    def meet(self, version: int, every: int, budget: int) -> bool:
        """Wait for the others, if a meeting is due; returns whether all are there, with nothing on its way."""
        number, answer = self.ledger.arrive(version, every, budget), 0
        if not number:
            return False
        while not (answer := self.ledger.decided(number)):
            self._comm.progress()
            time.sleep(PAUSE_S)
        return answer > 0

    def Free(self) -> None:
        """Collective; the shards must not be touched afterwards."""
        if not self.freed:
            self.freed = True
            self.shards, self.own = [], None
            self._memory.Free()
