"""The store of a one-sided parameter server: shards that ranks serve beside their own training."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpiddl.collectives.wire import VERBS
from mpiddl.layout import block_bounds
from mpiddl.node.topology import Topology, neighbours
from mpiddl.strategies.base import Replica
from mpiddl.strategies.server.memory_lines import Layout, MemoryLines
from mpiddl.strategies.server.message_lines import MessageLines
from mpiddl.strategies.server.push_ledger import Ledger
from mpiddl.strategies.server.remote_shard import Desk, RemoteLedger, RemoteShard
from mpiddl.strategies.server.rule import Rule
from mpiddl.strategies.server.shard import MOMENT, Shard
from mpiddl.transport.comm import Comm
from mpiddl.transport.meter import booked
from mpiddl.tuning.verbs import works

PAUSE_S = 0.001
"""Seconds between two polls of a worker that waits for a meeting."""

BOOK = 8 * Ledger.WORDS
"""Size of the ledger in bytes."""


class Store:
    """The shards of a model, one on each of the last ``rule.servers`` ranks. The first of these ranks also keeps the ledger.

    Parameters
    ----------
    comm : Comm
        All ranks; all of them train.
    rule : Rule
    replica : Replica
    saved : dict or None
        This rank's part from `saved`, for a resumed run.
    limit_s : float, optional
        Time limit for an answer of another rank.

    Attributes
    ----------
    shards : list of Shard or RemoteShard
        Those of this rank's node in shared memory, others over verbs where these work, else through messages.
    spans : list of (int, int)
        Begin and end of each shard in the parameters.
    order : list of int
        Order of access: shards of other nodes first. Each rank begins with a different shard.
    ledger : Ledger or RemoteLedger

    Communication
    -------------
    Collective over ``comm``: shared memory for each node, a barrier, and with several nodes two duplications, or remote memory.
    """

    def __init__(self, comm: Comm, rule: Rule, replica: Replica, saved: dict[str, Any] | None = None,
                 limit_s: float = float("inf")):
        self._comm, self._parts, self.freed = comm, (rule, replica), False
        rule.check_arrays(comm.size, replica.params[:1], len(replica.layers))
        self.spans = [block_bounds(replica.params.size, rule.servers, number) for number in range(rule.servers)]
        near, servers = neighbours(comm), range(comm.size - rule.servers, comm.size)
        node = near.topology.nodes[near.topology.node(comm.rank)]
        far = [rank for rank in range(comm.size) if rank not in node]
        self._mine, self._counted = comm.rank - servers[0], (0, 0)  # bytes and messages
        self._memory = near.local.share(self._size_bytes())
        self._segments = {rank - servers[0]: memory for rank, memory in zip(node, self._memory.segments, strict=True)}
        self._begin(saved)
        self._lines = self._opened(near.topology, servers, limit_s) if far else None
        self._desk = self._served(far, saved) if self._lines and self._mine >= 0 else None
        lines = {number: self._lines.line(number) for number, server in enumerate(servers) if self._lines and server in far}
        self.shards = [RemoteShard(lines[number]) if number in lines else self._shard(number) for number in range(rule.servers)]
        self.ledger = RemoteLedger(lines[0]) if 0 in lines else self._book()
        turns = [(comm.rank + turn) % rule.servers for turn in range(rule.servers)]
        self.order = sorted(turns, key=lambda number: number not in lines)
        comm.Barrier()

    @property
    def placed(self) -> str:
        """In words, where the shards lie."""
        direct = isinstance(self._lines, MemoryLines) and self._lines.direct
        return "shared memory of the servers' nodes" + ", registered for verbs" * direct

    def saved(self) -> dict[str, Any] | None:
        """The part that this rank serves, as views, for the state of a strategy."""
        if self._mine < 0:
            return None
        met = self._book().met if self._mine == 0 else 0
        return {**self._shard(self._mine).saved(), "met": met, "far": self._desk.saved if self._desk else {}}

    def meet(self, version: int, every: int, budget: int) -> bool:
        """Wait for the other ranks if a meeting is due. Returns whether all ranks meet; then no messages are in flight."""
        with booked(self._comm, "waiting"):
            number, answer = self.ledger.arrive(version, every, budget), 0
            while number and not (answer := self.ledger.decided(number)):
                self._comm.progress()
                time.sleep(PAUSE_S)
        return answer > 0

    def moment(self, number: int, name: str, own: np.ndarray) -> np.ndarray | float:
        """This rank's part of a sum over all ranks: the moment ``name`` of shard ``number``.

        ``own`` is the moment of this rank as a worker, which a rule with moments of its own has applied to the shards of this
        node. For workers on other nodes, the serving rank has their moments.
        """
        (rule, _), shard = self._parts, self.shards[number]
        if not rule.own_moments:
            return shard.arrays[f"{MOMENT}{name}"] if isinstance(shard, Shard) and number == self._mine else 0.0
        far = self._desk.saved.values() if self._desk and number == self._mine else ()
        return sum((its[name] for its in far), own if isinstance(shard, Shard) else 0.0)

    def count(self) -> None:
        """Add what was sent to other nodes since the last call to the communicator's meter."""
        meters = self._lines.meters if self._lines else ()
        sent = sum(meter.bytes for meter in meters), sum(meter.messages for meter in meters)
        self._comm.meter.sent(sent[0] - self._counted[0], sent[1] - self._counted[1])
        self._counted = sent

    def Free(self) -> None:
        """Collective. The shards must not be used afterwards, and no rank may be waiting for an answer."""
        if not self.freed:
            self.freed = True
            if self._desk:
                self._desk.end()
            if self._lines:
                self._lines.Free()
            self.shards, self._segments = [], {}
            self._memory.Free()

    def _size_bytes(self) -> int:
        """Size of this rank's part of the shared memory."""
        if self._mine < 0:
            return 0
        return Shard.size_bytes(*self._parts, self._comm.size, self.spans[self._mine]) + BOOK * (self._mine == 0)

    def _begin(self, saved: dict[str, Any] | None) -> None:
        """Fill the shard and the ledger of this rank."""
        if self._mine >= 0:
            own = self._shard(self._mine)
            own.begin(saved)
            if self._mine == 0:
                self._book().begin(own.guard.changes, saved["met"] if saved else 0)

    def _shard(self, number: int) -> Shard:
        memory = self._segments[number][BOOK * (number == 0) :]
        return Shard(self._comm, *self._parts, self.spans[number], memory)

    def _sums(self) -> int:
        """How many numbers `Rule.layer_sums` has."""
        rule, replica = self._parts
        return len(replica.layers) if rule.sums_layers else 0

    def _book(self) -> Ledger:
        return Ledger(self._comm, self._segments[0][:BOOK].view(np.int64))

    def _opened(self, topology: Topology, servers: range, limit_s: float) -> MessageLines | MemoryLines:
        """What carries requests to other nodes."""
        comm, (rule, replica) = self._comm, self._parts
        if not works(comm, aloud=False):
            return MessageLines(comm, servers, self._sums(), limit_s)
        layout = Layout(topology, servers, self.spans, replica.params.itemsize, self._sums())
        own = self._segments[self._mine][BOOK * (self._mine == 0) :] if self._mine >= 0 else np.empty(0, np.uint8)
        shared = vars(type(rule)).get("needs_pulled") is False  # not inherited: a derived class may need more
        return MemoryLines(comm, layout, own, shared, VERBS, limit_s)

    def _served(self, far: list[int], saved: dict[str, Any] | None) -> Desk:
        assert self._lines is not None
        rule, replica = self._parts
        part = slice(*self.spans[self._mine])
        moments = {name: moment[part] for name, moment in replica.moments.items()} if rule.own_moments else {}
        book = self._book() if self._mine == 0 else None
        return Desk(self._lines.requests(), self._shard(self._mine), book, far, moments, saved["far"] if saved else None)
