"""One-sided parameter server: the pushing rank applies the update rule itself, in shared memory.

All ranks train. All ranks, or the last ``servers`` of them, also serve one contiguous shard of the parameters each; the shard
lies in their memory. A worker with a gradient takes the lock of a shard, applies the rule to it
(`mpiddl.strategies.server.shard`), and pulls the new shard. For a shard on another node, a thread of the serving rank does this
(`mpiddl.strategies.server.remote_shard`). Workers never wait for each other's computation. They wait only for a running update
of the same shard, in the order of arrival. Laws are those of the two-sided form: with one worker the steps are those
of the optimiser, bit for bit.

Each push is first entered in a ledger (`mpiddl.strategies.server.push_ledger`), so that all shards receive the same pushes. At
a meeting each rank pulls once more. All ranks then hold the same parameters, and the serving rank holds those of its shard.

Cost: per step of a worker on the shard's node, the memory traffic of the rule and one copy; between nodes, V bytes out and V
back.
Memory: the model and its moments once (the moments once per worker, if workers have their own), and each worker's copy.
Source: downpour SGD, Dean et al., NIPS 2012, section 4.1; updates by the workers in shared memory, Recht et al., Hogwild!, NIPS
2011. Departure: a shard is locked, so that no update is lost and no pull is torn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.layout import rank_shards
from mpiddl.strategies.base import Combined, Placement, Replica, Step, Strategy
from mpiddl.strategies.server.push import staleness
from mpiddl.strategies.server.rule import Rule
from mpiddl.strategies.server.shards import Store
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm
from mpiddl.transport.meter import booked

STORE = "parameter server"


@dataclass(frozen=True)
class OneSided(Strategy):
    """A rule of a parameter server, applied by the workers.

    rule : the number of servers, and the treatment of a push.
    """

    rule: Rule
    replicated = False
    lockstep = False

    def check(self, size: int) -> None:
        if self.rule.servers > size:
            raise UsageError(f"servers: got {self.rule.servers}, expected 1 to {size}, the number of ranks")

    def placement(self, shards: int, rank: int, size: int) -> Placement:
        return Placement(rank_shards(shards, size, rank), endless=True)

    def init(self, comm: Comm, replica: Replica) -> Any:
        self.rule.check_size(replica.params.size)
        begun = {"begun": replica.begun, "seen": replica.updates}
        store = self._store(comm, begun, replica)
        return {**begun, "pulled": [0] * self.rule.servers, "count": 0, "delays": {}, "serves": store.saved()}

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        store, budget = self._store(comm, state, replica), (step.steps - state["begun"]) * comm.size
        grad *= grad.dtype.type(1 / max(step.count, 1))
        done = state["pulled"][0] // comm.size
        with booked(comm, "moving"):
            if not store.ledger.enter(budget):
                return Combined(grad, 0, state, stop=True)
            self._push(comm, store, state, grad, replica)
            self._pull(store, state, replica)
            state["count"] += 1
            meet = store.meet(state["version"] + 1, step.meet * comm.size, budget)
            if meet:
                self._pull(store, state, replica)  # no messages are in flight: all ranks pull the same parameters
        store.count()
        state["serves"] = store.saved()
        return Combined(grad, 0, state, updates=state["pulled"][0] // comm.size - done, meet=meet)

    def model(self, comm: Comm, state: Any, params: np.ndarray) -> np.ndarray:
        """The parameters of this rank. At a meeting they are the same on all ranks."""
        return params

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        store = self._store(comm, state, replica)
        with booked(comm, "moving"):
            store.ledger.leave()
            comm.patient_barrier()
            self._pull(store, state, replica)
            comm.patient_barrier()
        store.count()
        delays: dict[str, int] = {}
        for theirs in comm.setup_allgather(state["delays"]):
            for delay, count in theirs.items():
                delays[delay] = delays.get(delay, 0) + count
        state["delays"], state["serves"], state["moments"] = delays, None, self._moments(comm, store, state, replica)
        store.Free()

    def moments(self, comm: Comm, state: Any, replica: Replica) -> tuple[dict[str, np.ndarray], int]:
        """Those in the shards; the mean over the workers if each has its own."""
        found: tuple[dict[str, np.ndarray], int] = state["moments"] if "moments" in state else self._moments(
            comm, self._store(comm, state, replica), state, replica)
        return found

    def _moments(self, comm: Comm, store: Store, state: Any, replica: Replica) -> tuple[dict[str, np.ndarray], int]:
        found = {name: np.zeros_like(moment) for name, moment in replica.moments.items()}
        for number, span in enumerate(store.spans):
            for name, moment in found.items():
                moment[slice(*span)] = store.moment(number, name, replica.moments[name][slice(*span)])
        for moment in found.values():
            comm.Allreduce(IN_PLACE, moment)
            if self.rule.own_moments:
                moment *= 1 / comm.size
        version = state["pulled"][0]
        return found, state["seen"] + version // (comm.size if self.rule.own_moments else 1)

    def served_from(self, comm: Comm, state: Any, replica: Replica) -> str:
        return self._store(comm, state, replica).placed

    def figures(self, comm: Comm, state: Any, replica: Replica) -> dict[str, Any]:
        return {"staleness": staleness(state["delays"])}

    def _store(self, comm: Comm, state: Any, replica: Replica) -> Store:
        """The store; opened by `init`, or at the first step of a resumed run."""

        def opened() -> Store:
            later = Replica(replica.params, replica.moments, replica.apply, lambda steps: replica.rate(state["begun"] + steps),
                            updates=state["seen"], layers=replica.layers, proportional=replica.proportional)
            return Store(comm, self.rule, later, state.get("serves"))

        return comm.kept(STORE, opened)

    def _push(self, comm: Comm, store: Store, state: Any, grad: np.ndarray, replica: Replica) -> None:
        """Push the gradient to all shards. Shards on other nodes are updated at the same time as those of this node."""
        answers, sums = {}, self.rule.layer_sums(grad, replica.layers)
        for number in store.order:
            part = slice(*store.spans[number])
            moments = {name: moment[part] for name, moment in replica.moments.items()}
            answers[number] = store.shards[number].push(grad[part], replica.params[part], comm.rank, state["pulled"][number],
                                                        state["count"], moments, sums)
        state["version"] = answers[0]()
        delay = str(state["version"] - state["pulled"][0])
        state["delays"][delay] = state["delays"].get(delay, 0) + 1
        for answer in answers.values():
            answer()

    def _pull(self, store: Store, state: Any, replica: Replica) -> None:
        answers = {number: store.shards[number].pull(replica.params[slice(*store.spans[number])]) for number in store.order}
        for number, answer in answers.items():
            state["pulled"][number] = answer()
