"""Client (iii): rank 0 owns the parameters and every update; the others push gradients and pull parameters at their own pace.

Each worker may have its own number of steps. Cost a step of a worker: V bytes out, V bytes back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpiddl.layout import rank_shards
from mpiddl.strategies import Combined, Placement, Strategy

PUSH, PULL, DONE = 1, 2, 3


@dataclass(frozen=True)
class Served(Strategy):
    """An asynchronous parameter server. ``budget[rank]``, where given, is the number of steps that rank takes."""

    budget: tuple[int, ...] = ()
    replicated = False
    lockstep = False

    def placement(self, shards, rank, size):
        return Placement((), serves=size - 1) if rank == 0 else Placement(rank_shards(shards, size - 1, rank - 1))

    def init(self, comm, replica):
        return {"client": 0, "working": comm.size - 1, "pushes": [0] * comm.size}

    def combine(self, comm, state, grad, replica, step):
        if comm.rank == 0:
            return self._receive(comm, state, grad)
        if self.budget and step.index >= self.budget[comm.rank]:
            return Combined(grad, 0, state, stop=True)
        comm.Send(np.append(grad, grad.dtype.type(step.count)), 0, PUSH)
        return Combined(grad, 0, state)

    def _receive(self, comm, state, grad):
        message = np.empty(grad.size + 1, grad.dtype)
        while state["working"]:
            client, tag = comm.Probe()
            comm.Recv(message, client, tag)
            if tag == PUSH:
                grad[:] = message[:-1]
                pushes = [n + (rank == client) for rank, n in enumerate(state["pushes"])]
                return Combined(grad, int(message[-1]), {**state, "client": client, "pushes": pushes})
            state = {**state, "working": state["working"] - 1}
        return Combined(grad, 0, state, stop=True)

    def mix(self, comm, state, replica, step):
        comm.Send(replica.params, state["client"], PULL) if comm.rank == 0 else comm.Recv(replica.params, 0, PULL)
        return state

    def finish(self, comm, state, replica):
        if comm.rank:
            comm.Send(replica.params[:1], 0, DONE)
