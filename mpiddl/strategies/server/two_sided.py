"""Asynchronous SGD with a parameter server: serving ranks hold the parameters and make all updates.

This form works everywhere. `mpiddl.strategies.server.one_sided` is the other form, used where it works.

The last ``servers`` ranks serve one contiguous shard of the parameters each; all other ranks are workers. A worker computes a
gradient at its parameters, sends each server the part for its shard (push), and receives the shard after the update (pull). The
update is that of a rule (`mpiddl.strategies.server.rule`), which may depend on the delay (staleness) of the gradient: the
number of updates of the shard since the worker pulled it.

Laws: a pull returns the shard as it was between two updates; a push is applied once; the version of a shard is the number of
pushes applied to it. Workers do not wait for each other's computation, unless a staleness bound is set
(`mpiddl.strategies.server.staleness_bound`). With one worker the steps are those of the optimiser alone, bit for bit.

The run takes ``workers x steps`` pushes; fast workers make more of them. All ranks meet, with no messages in flight, after a
given number of updates of the first server. This server announces the meeting to each worker with its next answer. When all
workers have arrived, it tells them so, and each worker passes this on to the other servers.

Cost: per step of a worker, V bytes out and V bytes back. A server holds a copy of its shard for each worker, and the moments.
Source: downpour SGD, Dean et al., NIPS 2012, section 4.1; push and pull are one exchange here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.layout import block_bounds, rank_shards
from mpiddl.strategies.base import Combined, Placement, Replica, Step, Strategy
from mpiddl.strategies.server.push import Push, layers_of, staleness
from mpiddl.strategies.server.rule import Rule
from mpiddl.strategies.server.staleness_bound import going
from mpiddl.transport.comm import Comm

PUSH, PULL, MEET, STOP, DONE, ALL, NONE, SUMS = range(1, 9)
"""Tags. From workers: PUSH, a gradient; SUMS, before it, the result of `layer_sums`; DONE, the worker leaves. To workers: PULL,
parameters; MEET, parameters, and wait for the decision about a meeting; STOP, the run is over. From the first server, passed on
by workers: ALL, all ranks meet; NONE, a worker has left, so there is no meeting."""


@dataclass(frozen=True, repr=False)
class TwoSided(Strategy):
    """A parameter server whose serving ranks apply ``rule``."""

    rule: Rule
    replicated = False
    lockstep = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimisers", self.rule.optimisers)

    def __repr__(self) -> str:
        return repr(self.rule)

    def check(self, size: int) -> None:
        servers = self.rule.serving
        if size <= servers:
            raise UsageError(f"ranks: got {size}, expected {servers + 1} or more: {servers} as servers, the others as workers")

    def placement(self, shards: int, rank: int, size: int) -> Placement:
        workers = size - self.rule.serving
        if rank >= workers:
            return Placement((), serves=workers)
        return Placement(rank_shards(shards, workers, rank), endless=True)

    def served_from(self, comm: Comm, state: Any, replica: Replica) -> str:
        return "memory of the servers"

    def init(self, comm: Comm, replica: Replica) -> Any:
        workers = comm.size - self.rule.serving
        self.rule.check_size(replica.params.size)
        self.rule.check_arrays(workers, replica.params[:1], len(replica.layers))
        if comm.rank < workers:
            return {"over": False}
        begin, end = self._shard(comm, replica, comm.rank - workers)
        shard = replica.params[begin:end]
        moments = {name: moment[begin:end] for name, moment in replica.moments.items()}
        owners = workers if self.rule.own_moments else 1
        return {
            "version": 0, "pulled": [0] * workers, "counts": [0] * workers, "left": [], "delays": {}, "met": 0, "told": [],
            "held": [], "here": 0, "begun": replica.begun, "seen": replica.updates,
            "before": np.tile(shard, (workers, 1)),
            "moments": {name: np.tile(moment, (owners, 1)) for name, moment in moments.items()},
            "sums": np.zeros((workers, len(replica.layers) if self.rule.sums_layers else 0)),
            **self.rule.arrays(workers, shard, len(replica.layers)),
        }  # fmt: skip

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        if comm.rank < comm.size - self.rule.serving:
            return self._work(comm, state, grad, replica, step)
        return self._serve(comm, state, grad, replica, step)

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        workers = comm.size - self.rule.serving
        if comm.rank < workers and not state["over"]:
            for server in range(workers, comm.size):
                self._tell(comm, server, DONE, replica)
        if comm.rank >= workers:  # workers that the time limit has stopped before
            while len(state["left"]) < workers:
                self._next(comm, state, replica, np.empty_like(replica.params), rate=0.0, budget=0)
        replica.params[:] = self.model(comm, state, replica.params)
        state["delays"] = comm.bcast(state.get("delays"), workers)

    def model(self, comm: Comm, state: Any, params: np.ndarray) -> np.ndarray:
        """The parameters, collected from the shards of all servers."""
        whole = params.copy()
        for number in range(self.rule.serving):
            begin, end = block_bounds(params.size, self.rule.serving, number)
            comm.Bcast(whole[begin:end], comm.size - self.rule.serving + number)
        return whole

    def moments(self, comm: Comm, state: Any, replica: Replica) -> tuple[dict[str, np.ndarray], int]:
        """Those of the servers; the mean over the workers if each has its own."""
        workers, whole = comm.size - self.rule.serving, {name: moment.copy() for name, moment in replica.moments.items()}
        for number in range(self.rule.serving):
            part = slice(*self._shard(comm, replica, number))
            for name, moment in whole.items():
                if comm.rank == workers + number:
                    moment[part] = state["moments"][name].mean(axis=0)
                comm.Bcast(moment[part], workers + number)
        seen = 0 if comm.rank < workers else state["seen"] + state["version"] // (workers if self.rule.own_moments else 1)
        return whole, comm.bcast(seen, workers)

    def figures(self, comm: Comm, state: Any, replica: Replica) -> dict[str, Any]:
        return {"staleness": staleness(state["delays"])}

    def _work(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        servers = range(comm.size - self.rule.serving, comm.size)
        grad *= grad.dtype.type(1 / max(step.count, 1))
        sums = self.rule.layer_sums(grad, replica.layers)
        sent = [comm.Isend(sums, server, SUMS) for server in servers if sums.size]
        for number, server in enumerate(servers):
            begin, end = self._shard(comm, replica, number)
            sent.append(comm.Isend(grad[begin:end], server, PUSH))
        tags, word = dict[int, int](), 0
        while len(tags) < len(servers):  # in order of arrival: a server that waits for this worker may delay others
            server, tag = comm.Probe()
            if server in tags:
                word = self._told(comm, server, replica)
                continue
            begin, end = self._shard(comm, replica, server - servers[0])
            comm.Recv(replica.params[begin:end], server, tag)
            tags[server] = tag
        for request in sent:
            request.Wait()
        meet = tags[servers[0]] == MEET and (word or self._told(comm, servers[0], replica)) == ALL
        for server in servers[1:] if meet else ():
            self._tell(comm, server, ALL, replica)
        over = STOP in tags.values()
        for server, tag in tags.items():
            if over and tag != STOP:
                self._tell(comm, server, DONE, replica)
        return Combined(grad, 0, {"over": over}, stop=over, meet=meet)

    def _serve(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        workers = comm.size - self.rule.serving
        budget = (step.steps - state["begun"]) * workers
        while len(state["left"]) < workers:
            push = self._next(comm, state, replica, grad, step.rate, budget)
            if push is None and state["told"] and state["left"]:
                self._nobody_meets(comm, state, replica)
            if push is None and state["held"]:
                self._let_go(comm, state, replica)
            if push is None and state["here"] == workers:
                state["here"] = 0
                return Combined(grad, 0, state, meet=True)
            if push is None:
                continue
            self.rule.update(state, push, replica.apply)
            meet = self._answer(comm, state, push, replica, step.meet * workers, budget)
            return Combined(grad, 0, state, updates=1, meet=meet)
        return Combined(grad, 0, state, stop=True)

    def _next(self, comm: Comm, state: Any, replica: Replica, room: np.ndarray, rate: float, budget: int) -> Push | None:
        """Receive the next message into ``room``: a push, or None if a worker leaves or all pushes have been made."""
        workers = comm.size - self.rule.serving
        begin, end = self._shard(comm, replica, comm.rank - workers)
        shard, grad = replica.params[begin:end], room[begin:end]
        worker, tag = comm.Probe()
        if tag == SUMS:  # of the gradient that this worker sends next
            comm.Recv(state["sums"][worker], worker, tag)
            tag = comm.Probe(worker).tag
        comm.Recv(grad, worker, tag)
        if tag == PUSH and state["version"] < budget:
            delay, count = state["version"] - state["pulled"][worker], state["counts"][worker]
            moments = {name: rows[worker if self.rule.own_moments else 0] for name, rows in state["moments"].items()}
            seen = state["seen"] + (count if self.rule.own_moments else state["version"])
            return Push(shard, grad, state["before"][worker], worker, workers, delay, count, rate, moments, seen,
                        state["sums"][worker], layers_of(replica.layers, begin, end))
        if tag == ALL:
            state["here"] += 1
            return None
        if tag == PUSH:
            comm.Send(shard, worker, STOP)
        state["left"].append(worker)
        return None

    def _answer(self, comm: Comm, state: Any, push: Push, replica: Replica, every: int, budget: int) -> bool:
        """Count an applied push and send the shard to its worker. Returns whether all ranks meet now."""
        delays = state["delays"]
        delays[str(push.delay)] = delays.get(str(push.delay), 0) + 1
        state["version"] += 1
        state["counts"][push.worker] += 1
        if self.rule.bound >= 0:
            state["held"].append(push.worker)
            return self._let_go(comm, state, replica, every, budget)
        due = self._due(comm, state, every, budget)
        self._hand(comm, state, replica, push.worker, MEET if due else PULL)
        if due:
            state["told"].append(push.worker)
        return len(state["told"]) == push.workers and self._all_meet(comm, state, replica, every)

    def _let_go(self, comm: Comm, state: Any, replica: Replica, every: int = 0, budget: int = 0) -> bool:
        """Answer the waiting workers that may continue. Returns whether all ranks meet now."""
        held, due = state["held"], self._due(comm, state, every, budget)
        free = going(state["counts"], held, state["left"], self.rule.bound, due)
        meet = due and not free and len(held) == len(state["counts"])
        for worker in held if meet else free:
            self._hand(comm, state, replica, worker, MEET if meet else PULL)
        state["held"] = [] if meet else [worker for worker in held if worker not in free]
        state["told"] = held if meet else []
        return meet and self._all_meet(comm, state, replica, every)

    def _due(self, comm: Comm, state: Any, every: int, budget: int) -> bool:
        """Whether a meeting is due. Only the first server decides this."""
        first = comm.rank == comm.size - self.rule.serving and every and not state["left"]
        return bool(first) and (state["met"] + 1) * every <= state["version"] < budget

    def _hand(self, comm: Comm, state: Any, replica: Replica, worker: int, tag: int) -> None:
        """Send the shard to ``worker``."""
        begin, end = self._shard(comm, replica, comm.rank - (comm.size - self.rule.serving))
        state["pulled"][worker] = state["version"]
        state["before"][worker][:] = replica.params[begin:end]
        comm.Send(replica.params[begin:end], worker, tag)

    def _all_meet(self, comm: Comm, state: Any, replica: Replica, every: int) -> bool:
        for worker in state["told"]:
            self._tell(comm, worker, ALL, replica)
        state["met"], state["told"] = state["version"] // every, []
        return True

    def _nobody_meets(self, comm: Comm, state: Any, replica: Replica) -> None:
        for worker in state["told"]:
            self._tell(comm, worker, NONE, replica)
        state["told"] = []

    def _tell(self, comm: Comm, rank: int, tag: int, replica: Replica) -> None:
        comm.Send(replica.params[:0], rank, tag)

    def _told(self, comm: Comm, rank: int, replica: Replica) -> int:
        tag = comm.Probe(rank).tag
        comm.Recv(replica.params[:0], rank, tag)
        return tag

    def _shard(self, comm: Comm, replica: Replica, number: int) -> tuple[int, int]:
        return block_bounds(replica.params.size, self.rule.serving, number)
