"""The one-sided parameter server against the limits: a copy of the model in memory, the wire, and a server over gRPC.

On one node, in turns on rank 0 while the others sleep: a copy of the model in private memory, a pull, a push with a pull, and
the same exchange with momentum SGD in another process over gRPC. On several, rank 0 pulls from the last rank, on another node:
while that rests, and while it trains a network and makes no call to MPI; and gets the same bytes from it as a plain message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from mpiddl.bench import step
from mpiddl.bench.grpc_server import MOMENTUM, RATE, Client
from mpiddl.errors import CommError
from mpiddl.machine.clock import now
from mpiddl.memory import aligned_zeros
from mpiddl.node.topology import neighbours
from mpiddl.optim import SGD
from mpiddl.strategies.base import Replica
from mpiddl.strategies.server.one_sided_check import trouble
from mpiddl.strategies.server.rules.asgd import ASGD
from mpiddl.strategies.server.shards import Store
from mpiddl.study.interleaved import Contender, quantiles, take_turns
from mpiddl.study.limits import HEADERS
from mpiddl.testbed.plan import read_rate
from mpiddl.transport.comm import Comm
from mpiddl.transport.mpi import world

SIZE = 1_863_690
"""Parameters of 784-1024-1024-10: 7.45 MB."""

COPY, PULL, EXCHANGE, GRPC = "memcpy", "pull", "push and pull", "gRPC"
MESSAGE, WIRE, COMPUTING = "message", "wire", "pull while the server computes (95 %)"

MEMORY_LEAST, GRPC_LEAST, WIRE_LEAST, COMPUTING_LEAST = 1 / 1.5, 6.0, 1 / 1.15, 0.5
"""Ratios that are wanted."""

BLOCK_S = 1.0
"""How long a server rests or computes at a time."""


def run(env: Any, seconds: float, rate: str | None = None) -> list[dict[str, Any]]:
    """The rows, on rank 0; elsewhere none.

    Parameters
    ----------
    seconds : float
        How long is measured.
    rate : str, optional
        What each link carries, such as "1gbit": the limit instead of a message's time.

    Raises
    ------
    CommError
        On every rank: one-sided communication cannot work here.

    Communication
    -------------
    Collective over ``COMM_WORLD``.
    """
    bits = read_rate(rate)
    with world(env) as link:
        why = trouble(link)
        if why:
            raise CommError(f"bench server: {why}. This benchmark needs ranks that can use one-sided communication")
        optimiser, near = SGD(momentum=MOMENTUM), neighbours(link).topology

        def apply(params: np.ndarray, grad: np.ndarray, moments: dict[str, np.ndarray], rate: float, *rest: float) -> None:
            optimiser.update(params, grad, moments, rate)

        replica = Replica(aligned_zeros(SIZE, np.float32), optimiser.init(SIZE, np.float32), apply, lambda steps: RATE)
        store = Store(link, ASGD(1), replica)
        shard = store.shards[0]
        case = f"{4 * SIZE / 1e6:.2f} MB, {near}"
        if len(near.nodes) == 1:
            rows = list(_on_node(link, case, shard, replica.params, seconds))
        else:
            rows = list(_between(link, case, shard, replica.params, seconds, bits))
        link.patient_barrier()
        store.Free()
        return [] if link.rank else rows


def _on_node(comm: Comm, case: str, shard: Any, params: np.ndarray, seconds: float) -> Iterator[dict[str, Any]]:
    alone = comm.Split(comm.rank)
    if comm.rank:
        return
    grad, source, target = (aligned_zeros(SIZE, np.float32) for _ in range(3))
    grad[:], source[:] = 1, 1  # what was never written is one page of zeros

    def exchange() -> None:
        pulled = shard.pull(params)()
        shard.push(grad, params, 0, pulled, 0, {}, grad[:0])()

    contenders = {COPY: Contender(lambda: np.copyto(target, source)), PULL: Contender(lambda: shard.pull(params)()),
                  EXCHANGE: Contender(exchange)}
    client = Client(SIZE) if find_spec("grpc") else None
    if client:
        contenders[GRPC] = Contender(lambda: client.exchange(grad, target))
    take_turns(alone, contenders, seconds)
    if client:
        client.Free()
    found = {name: contender.seconds for name, contender in contenders.items()}
    yield _row(case, PULL, COPY, found, MEMORY_LEAST)
    if client:
        yield _row(case, EXCHANGE, GRPC, found, GRPC_LEAST)


def _between(comm: Comm, case: str, shard: Any, params: np.ndarray, seconds: float,
             bits: float | None) -> Iterator[dict[str, Any]]:
    """A block of each in turn; the last rank serves, and does meanwhile what the block says."""
    rng, server = np.random.default_rng(0), comm.size - 1
    learn = step.ours((784, 1024, 1024, 10), rng.random((64, 784), dtype=np.float32), rng.integers(0, 10, 64), 1)
    found: dict[str, list[float]] = {MESSAGE: [], PULL: [], COMPUTING: []}
    if comm.rank == server:
        learn()
    for _ in range(max(1, round(seconds / (3 * BLOCK_S)))):
        for name, samples in found.items():
            comm.patient_barrier()
            until = now() + BLOCK_S
            if comm.rank == server and name == COMPUTING:
                while now() < until:
                    learn()
            elif comm.rank == 0 and name != MESSAGE:
                _sample(samples, lambda: shard.pull(params)(), until)
            elif name == MESSAGE and comm.rank in (0, server):
                for _ in range(5):
                    _message(comm, server, params, samples)
    if comm.rank == 0:
        if bits:
            found[WIRE] = [4 * SIZE * 8 * HEADERS / bits]
        yield _row(case, PULL, WIRE if bits else MESSAGE, found, WIRE_LEAST)
        found[COMPUTING] = [float(np.percentile(found[COMPUTING], 95))]
        yield _row(case, COMPUTING, PULL, found, COMPUTING_LEAST)


def _sample(samples: list[float], call: Callable[[], Any], until: float) -> None:
    while (began := now()) < until:
        call()
        samples.append(now() - began)


def _message(comm: Comm, server: int, params: np.ndarray, samples: list[float]) -> None:
    """The parameters from ``server`` to rank 0, by a message that it sends when it has got one."""
    token, began = np.zeros(1), now()
    if comm.rank == 0:
        comm.Send(token, server)
        comm.Recv(params, server)
        samples.append(now() - began)
    else:
        comm.Recv(token, 0)
        comm.Send(params, 0)


def _row(case: str, contender: str, baseline: str, found: dict[str, list[float]], wanted: float) -> dict[str, Any]:
    (low, median, high), against = quantiles(found[contender]), quantiles(found[baseline])[1]
    return {"case": case, "contender": contender, "baseline": baseline, "seconds": median, "baseline_seconds": against,
            "ratio": against / median, "p10": low, "p90": high, "wanted": wanted, "size_bytes": 4 * SIZE}
