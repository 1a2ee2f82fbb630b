"""The redundancy with which a step is shortest here: computation and network are measured, the rest is predicted.

A step of the slowest worker takes T(r) + bytes / rate. T(r) is measured for each number of groups, and the bytes are those of
`mpiddl.coding.loads`. Redundancy 1 is a ring, whose time is measured. With redundancy and multicast, no step waits for a worker
that is slower than the median.

Cost: three gradients for each number of groups, two sums of the whole gradient, and two all-gathers of at most 1 MiB by
multicast.
Source: ours; the model is that of `mpiddl.coding.step_times`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np

from mpiddl.coding.loads import Load, groups, replicate_and_slice, replicate_and_slice_unicast
from mpiddl.collectives import TwoStep
from mpiddl.collectives.allreduce_replicated_multicast import ReplicatedMulticast
from mpiddl.errors import TransportError
from mpiddl.layout import ceil_div
from mpiddl.transport.agree import agreed
from mpiddl.transport.comm import Comm

PROBE_BYTES = 1 << 20
"""Sent by each worker to measure multicast."""

WORTH = 0.97
"""Redundancy has to make a step so much shorter than without, as predictions go."""


LOADS: dict[str, Callable[[int, int, int], Load]] = {
    "multicast": replicate_and_slice,
    "unicast": replicate_and_slice_unicast,
}


class Trial(Protocol):
    """What can be measured before a run (`mpiddl.training.trial`)."""

    size: int
    dtype: np.dtype
    batch: int

    def gradient_seconds(self, comm: Comm, rows: int) -> list[float]:
        """By rank. Collective."""


class Option(NamedTuple):
    """A redundancy, by what it is sent, and the predicted seconds of a step."""

    redundancy: int
    transport: str
    compute_s: float
    send_s: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.send_s

    def __str__(self) -> str:
        way = "" if self.redundancy == 1 else f" by {self.transport}"
        return f"redundancy {self.redundancy}{way} {1e3 * self.seconds:.3g} ms"


def options(comm: Comm, members: Sequence[Sequence[int]], trial: Trial, transports: Sequence[str],
            interface: str = "") -> list[Option]:
    """All that could be done, the shortest step first; the same on every rank. Collective.

    ``members``: the ranks of each worker. ``transports``: multicast, unicast, or both.
    """
    workers, nbytes = len(members), trial.size * trial.dtype.itemsize
    computing = {count: trial.gradient_seconds(comm, ceil_div(trial.batch, count * len(members[0])))
                 for count in sorted({groups(workers, redundancy) for redundancy in range(1, workers + 1)})}
    ring_s = _ring_seconds(comm, trial)
    found = [Option(1, "unicast", max(computing[workers]), ring_s)]
    rates = {"unicast": 2 * nbytes * (workers - 1) / workers / ring_s if workers > 1 else 0.0}
    if "multicast" in transports and (rate := _multicast_rate(comm, members, trial, interface)):
        rates["multicast"] = rate
    for count in [count for count in computing if count < workers]:
        redundancy = workers // count
        for transport in [name for name in transports if name in rates]:
            load = LOADS[transport](workers, redundancy, nbytes)
            each = median(computing[count]) if transport == "multicast" else max(computing[count])
            found.append(Option(redundancy, transport, each, max(load.egress, load.ingress) / rates[transport]))
    return sorted(found, key=lambda option: (option.seconds * (1 if option.redundancy > 1 else WORTH), option.redundancy))


def _ring_seconds(comm: Comm, trial: Trial) -> float:
    """Of the sum of a gradient without redundancy."""
    if comm.size == 1:
        return 0.0
    plan, taken = TwoStep(comm, trial.size, trial.dtype), []
    for _ in range(2):
        comm.Barrier()
        began = comm.now()
        plan()
        taken.append(max(comm.setup_allgather(comm.now() - began)))
    plan.Free()
    return min(taken)


def _multicast_rate(comm: Comm, members: Sequence[Sequence[int]], trial: Trial, interface: str) -> float:
    """Bytes a second that a worker receives when all send; 0 where multicast does not work."""
    leading = comm.rank in [ranks[0] for ranks in members]
    leaders = comm.Create([ranks[0] for ranks in members] if leading else [comm.rank])
    size = max(min(PROBE_BYTES // trial.dtype.itemsize, trial.size), 1)
    exchange, taken = None, [0.0]
    try:
        with agreed(comm):
            if leading:
                alone = [[worker] for worker in range(len(members))]
                exchange = ReplicatedMulticast(leaders, alone, size, trial.dtype, 2, interface)
    except TransportError:
        return 0.0
    for _ in range(2):
        comm.Barrier()
        began = comm.now()
        if exchange is not None:
            exchange(np.zeros(size, trial.dtype))
        taken.append(max(comm.setup_allgather(comm.now() - began if leading else 0.0)))
    if exchange is not None:
        exchange.Free()
    return (len(members) - 1) * size * trial.dtype.itemsize / min(taken[1:])
