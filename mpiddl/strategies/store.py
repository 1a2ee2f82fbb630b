"""Where the workers of a parameter server push to and pull from: shards that ranks serve beside their own work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddl.collectives.base import block_bounds
from mpiddl.strategies.base import Replica
from mpiddl.strategies.ledger import Ledger
from mpiddl.strategies.remote import Desk, Line, RemoteLedger, RemoteShard
from mpiddl.strategies.shard import Shard
from mpiddl.topology import neighbours

PAUSE_S = 0.001
"""Between two looks of a worker that waits for the others to meet: they compute."""

BOOK = 8 * Ledger.WORDS
"""Bytes of the ledger."""


class Store:
    """The shards of a model, one for each of the last ``rule.servers`` ranks, and the ledger, which the first of these keeps.

    Parameters
    ----------
    comm : Comm
        Of all workers; each of them works, and those that serve serve as well.
    rule : ParameterServer
    replica : Replica
    saved : dict or None
        This rank's part as `saved` gave it, to go on from.
    limit_s : float, optional
        Seconds within which another rank has to answer.

    Attributes
    ----------
    shards : list of Shard or RemoteShard
        As this rank has them: those of its node in shared memory, others by message.
    spans : list of (int, int)
        Where each begins and ends in the parameters.
    order : list of int
        In which to go through them: those of other nodes first, so that they are under way; each rank begins with another.
    ledger : Ledger or RemoteLedger

    Communication
    -------------
    Collective over ``comm``: shared memory for each node, where there are several two duplications, and a barrier.
    """

    def __init__(self, comm: Any, rule: Any, replica: Replica, saved: dict[str, Any] | None = None,
                 limit_s: float = float("inf")):
        self._comm, self._parts, self.freed = comm, (rule, replica), False
        self.spans = [block_bounds(replica.params.size, rule.servers, number) for number in range(rule.servers)]
        near, servers = neighbours(comm), range(comm.size - rule.servers, comm.size)
        node = near.topology.nodes[near.topology.node(comm.rank)]
        far = [rank for rank in range(comm.size) if rank not in node]
        self._mine, self._counted = comm.rank - servers[0], 0
        self._memory = near.local.share(self._size_bytes())
        self._segments = {rank - servers[0]: memory for rank, memory in zip(node, self._memory.segments, strict=True)}
        self._begin(saved)
        self._lines: Sequence[Any] = (comm.Dup(), comm.Dup()) if far else ()
        self._desk = self._opened(far, saved) if far and self._mine >= 0 else None
        lines = {number: Line(self._lines, server, limit_s) for number, server in enumerate(servers) if server in far}
        self.shards = [RemoteShard(lines[number]) if number in lines else self._shard(number) for number in range(rule.servers)]
        self.ledger = RemoteLedger(lines[0]) if 0 in lines else self._book()
        turns = [(comm.rank + turn) % rule.servers for turn in range(rule.servers)]
        self.order = sorted(turns, key=lambda number: number not in lines)
        comm.Barrier()

    def saved(self) -> dict[str, Any] | None:
        """What this rank serves, as the state of a strategy; views, of this moment."""
        if self._mine < 0:
            return None
        met = self._book().met if self._mine == 0 else 0
        return {**self.shards[self._mine].saved(), "met": met, "far": self._desk.saved if self._desk else {}}

    def meet(self, version: int, every: int, budget: int) -> bool:
        """Wait for the others, if a meeting is due; returns whether all are there, with nothing on its way."""
        number, answer = self.ledger.arrive(version, every, budget), 0
        if not number:
            return False
        while not (answer := self.ledger.decided(number)):
            self._comm.progress()
            time.sleep(PAUSE_S)
        return answer > 0

    def count(self) -> None:
        """Let the communicator's meter know what has been sent to other nodes since the last time."""
        total = sum(line.meter.bytes for line in self._lines)
        self._comm.meter.sent(total - self._counted, 0)
        self._counted = total

    def Free(self) -> None:
        """Collective; the shards must not be touched afterwards. Nobody may be waiting for an answer."""
        if not self.freed:
            self.freed = True
            if self._desk:
                self._desk.end()
            self.shards, self._segments = [], {}
            self._memory.Free()

    def _size_bytes(self) -> int:
        """Of this rank's part of the shared memory."""
        if self._mine < 0:
            return 0
        return Shard.size_bytes(*self._parts, self._comm.size, self.spans[self._mine]) + BOOK * (self._mine == 0)

    def _begin(self, saved: dict[str, Any] | None) -> None:
        """Fill what this rank serves."""
        if self._mine >= 0:
            own = self._shard(self._mine)
            own.begin(saved)
            if self._mine == 0:
                self._book().begin(own.guard.changes, saved["met"] if saved else 0)

    def _shard(self, number: int) -> Shard:
        memory = self._segments[number][BOOK * (number == 0) :]
        return Shard(self._comm, *self._parts, self.spans[number], memory)

    def _book(self) -> Ledger:
        return Ledger(self._comm, self._segments[0][:BOOK].view(np.int64))

    def _opened(self, far: list[int], saved: dict[str, Any] | None) -> Desk:
        rule, replica = self._parts
        part = slice(*self.spans[self._mine])
        moments = {name: moment[part] for name, moment in replica.moments.items()} if rule.own_moments else {}
        book = self._book() if self._mine == 0 else None
        return Desk(self._lines, self._shard(self._mine), book, far, moments, saved["far"] if saved else None)
