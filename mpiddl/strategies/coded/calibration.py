"""The redundancy with which a step is shortest here: computation and network are measured, the rest is predicted.

A step takes the time to compute and bytes / rate. The time of a gradient is measured for each number of rows, and the bytes are
those of `mpiddl.coding.loads`. Redundancy 1 is the strategy `auto`, whose sum is measured. With redundancy and multicast, slow
workers are not waited for where the code can do without them. A worker is taken to be slow if it takes `SLOW` times as long as
the median.

Cost: one encoding and decoding of the MDS code, and four times or for a quarter of a second each: a gradient for each number of
rows, a sum of the whole gradient by `auto`, one by a ring, an all-gather of nearly nothing, and one of at most 1 MiB by
multicast.
Source: ours; the model is that of `mpiddl.coding.step_times`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpiddl.coding.loads import Load, groups, mds, replicate_and_slice, replicate_and_slice_unicast
from mpiddl.coding.mds_code import MdsCode, computing_order
from mpiddl.coding.placements import BlockPlacement, cyclic, replicated_groups
from mpiddl.coding.step_times import step_seconds
from mpiddl.collectives import TwoStep
from mpiddl.collectives.allreduce_replicated_multicast import ReplicatedMulticast
from mpiddl.errors import TransportError
from mpiddl.layout import ceil_div
from mpiddl.machine.clock import enough
from mpiddl.strategies.base import Replica, Step
from mpiddl.strategies.synchronous.auto import Auto
from mpiddl.transport.agree import agreed
from mpiddl.transport.comm import Comm

PROBE_BYTES = 1 << 20
"""Sent by each worker to measure multicast."""

WORTH = 0.97
"""Redundancy has to make a step so much shorter than without, as predictions go."""

SLOW = 1.5
"""Times as long as the median."""


class Trial(Protocol):
    """What can be measured before a run (`mpiddl.training.trial`)."""

    size: int
    dtype: np.dtype
    batch: int

    def gradient_seconds(self, comm: Comm, rows: int) -> list[float]:
        """By rank. Collective."""


class Network(NamedTuple):
    """Seconds of an exchange of nothing, and bytes a second that a worker sends and receives at the same time."""

    latency_s: float
    rate: float

    def seconds(self, load: Load) -> float:
        return self.latency_s + step_seconds(load, 0, 0.0, self.rate)


class Option(NamedTuple):
    """A redundancy, by what code and how it is sent, and the predicted seconds of a step.

    whole : all workers compute the whole gradient.
    """

    redundancy: int
    code: str
    transport: str
    stragglers: int
    seconds: float
    whole: bool = False

    @property
    def way(self) -> str:
        if self.redundancy == 1:
            return "strategy auto"
        if self.whole:
            return "whole gradient on each worker" + (", late ones by multicast" if self.transport == "multicast" else "")
        late = f" without {self.stragglers} late" if self.stragglers else ""
        return f"{self.code} {'by multicast' if self.transport == 'multicast' else 'in rings'}{late}"

    def __str__(self) -> str:
        many = f", redundancy {self.redundancy}" if self.redundancy > 1 else ""
        return f"{self.way}{many}: {1e3 * self.seconds:.3g} ms"


def options(comm: Comm, members: Sequence[Sequence[int]], trial: Trial, codes: Sequence[str], transports: Sequence[str],
            stragglers: int = 0, interface: str = "") -> tuple[list[Option], str]:
    """All that could be done, the shortest step first, and why multicast does not work, or ""; the same on every rank.

    Collective. A `TransportError` on all ranks if multicast does not work and is the only transport.

    Parameters
    ----------
    members : the ranks of each worker.
    codes : slices, mds, or both.
    transports : multicast, unicast, or both.
    stragglers : workers that the MDS code has to do without.
    """
    workers, nbytes = len(members), trial.size * trial.dtype.itemsize
    seconds = _Seconds(comm, members, trial)
    found = [Option(1, "slices", "unicast", 0, max(seconds.of(workers)) + _auto_seconds(comm, trial))]
    networks = {}
    if "unicast" in transports:
        ring_s = _ring_seconds(comm, trial)
        rate = 2 * nbytes * (workers - 1) / workers / ring_s if workers > 1 and ring_s else float("inf")
        networks["unicast"] = Network(0.0, rate)
    trouble = ""
    if "multicast" in transports:
        try:
            networks["multicast"] = _multicast_network(comm, members, trial, interface)
        except TransportError as error:
            if transports == ["multicast"]:
                raise
            trouble = str(error)
    if "slices" in codes:
        found += _slices(workers, nbytes, seconds, networks)
    if "mds" in codes and workers > 2 and "multicast" in networks:
        found += _mds(comm, workers, trial, seconds, networks["multicast"], stragglers)
    found.sort(key=lambda option: (option.seconds * (1 if option.redundancy > 1 else WORTH), option.redundancy))
    return found, trouble


def rates(comm: Comm, members: Sequence[Sequence[int]], trial: Trial) -> list[float]:
    """Batches a second that each worker computes. Collective."""
    workers = len(members)
    return [1 / (workers * max(each, 1e-9)) for each in _Seconds(comm, members, trial).of(workers)]


def best_of_each_way(found: Sequence[Option]) -> list[Option]:
    """The first of each code and transport."""
    best: dict[str, Option] = {}
    for option in found:
        best.setdefault(option.way, option)
    return list(best.values())


class _Seconds:
    """Of the gradient of 1/count of the batch, by worker; measured once for each count."""

    def __init__(self, comm: Comm, members: Sequence[Sequence[int]], trial: Trial):
        self._comm, self._members, self._trial = comm, members, trial
        self._known: dict[int, list[float]] = {}

    def of(self, count: int) -> list[float]:
        """Collective."""
        if count not in self._known:
            rows = ceil_div(self._trial.batch, count * max(map(len, self._members)))
            taken = self._trial.gradient_seconds(self._comm, rows)
            self._known[count] = [max(taken[rank] for rank in ranks) for ranks in self._members]
        return self._known[count]


def _slices(workers: int, nbytes: int, seconds: _Seconds, networks: dict[str, Network]) -> Iterator[Option]:
    """Replicate-and-slice with each number of groups."""
    for count in sorted({groups(workers, redundancy) for redundancy in range(2, workers + 1)}):
        redundancy, taken = workers // count, seconds.of(count)
        placement = replicated_groups(workers, redundancy)
        for transport, network in networks.items():
            late = transport == "multicast"
            load = (replicate_and_slice if late else replicate_and_slice_unicast)(workers, redundancy, nbytes)
            compute_s = finished(placement, taken, 1) if late else max(taken)
            yield Option(redundancy, "slices", transport, 0, compute_s + network.seconds(load), count == 1)


def _mds(comm: Comm, workers: int, trial: Trial, seconds: _Seconds, network: Network,
         stragglers: int) -> Iterator[Option]:
    """The MDS code with each redundancy."""
    nbytes, taken, coding_s = trial.size * trial.dtype.itemsize, seconds.of(workers), _coding_seconds(comm, workers, trial)
    for redundancy in range(max(2, 1 + stragglers), workers):
        slices = redundancy - stragglers
        compute_s = finished(cyclic(workers, redundancy), taken, slices) if stragglers else redundancy * max(taken)
        load = mds(workers, slices, nbytes, workers - stragglers)
        yield Option(redundancy, "mds", "multicast", stragglers, compute_s + coding_s + network.seconds(load))


def finished(placement: BlockPlacement, seconds: Sequence[float], needed: int) -> float:
    """When so many owners of each block have finished it, if a block takes each worker so many seconds.

    By then the others have begun another block, if they have one more. They finish it.

    Only workers that are `SLOW` take longer than the median: the others differ by chance.

    Examples
    --------
    >>> finished(replicated_groups(4, 2), [1.0, 1.0, 1.0, 5.0], 1), finished(cyclic(4, 2), [1.0, 1.0, 1.0, 5.0], 1)
    (1.0, 2.0)
    """
    usual = median(seconds)
    steady = [each if each > SLOW * usual else usual for each in seconds]
    times: list[list[float]] = [[] for _ in placement.owners]
    for worker, each in enumerate(steady):
        for number, block in enumerate(computing_order(placement, worker), 1):
            times[block].append(number * each)
    over = max(sorted(block)[needed - 1] for block in times)
    begun = min(over // usual + 1, max(map(len, placement.blocks))) if usual else 0
    return max(over, begun * usual)


def _coding_seconds(comm: Comm, workers: int, trial: Trial) -> float:
    """To encode and decode with redundancy 2: other redundancies read and write as much, to a few percent."""
    code = MdsCode(cyclic(workers, 2), 2)
    chosen, gradient = code.choose(), np.zeros(trial.size, trial.dtype)
    assert chosen is not None  # all blocks are finished
    vector = np.zeros(code.slice_size(trial.size), trial.dtype)
    comm.patient_barrier()
    began = comm.now()
    for block in code.placement.blocks[0]:
        code.add_block(0, block, gradient, chosen, vector)
    code.decode(dict.fromkeys(range(workers), vector), chosen, gradient)
    return max(comm.setup_allgather(comm.now() - began))


def _auto_seconds(comm: Comm, trial: Trial) -> float:
    """Of the sum of a gradient by the strategy `auto`, after the gradient is computed."""
    auto, step = Auto(), Step(0, 1, comm.size, 0.0)
    memory = auto.memory(comm, trial.size, trial.dtype)
    gradient = np.zeros(trial.size, trial.dtype) if memory is None else memory
    replica = Replica(gradient, {})
    seconds = _timed(comm, lambda: auto.combine(comm, {}, gradient, replica, step))
    auto.finish(comm, {}, replica)
    return seconds


def _ring_seconds(comm: Comm, trial: Trial) -> float:
    """Of the sum of a gradient by rings without redundancy."""
    plan = TwoStep(comm, trial.size, trial.dtype)
    seconds = _timed(comm, plan)
    plan.Free()
    return seconds


def _timed(comm: Comm, do: Callable[[], Any]) -> float:
    """Of a collective, on the last rank."""
    taken: list[float] = []  # the same on all ranks
    while not enough(taken, alike=comm.simulated):
        comm.Barrier()
        began = comm.now()
        do()
        taken.append(max(comm.setup_allgather(comm.now() - began)))
    return median(taken[1:])


def _multicast_network(comm: Comm, members: Sequence[Sequence[int]], trial: Trial, interface: str) -> Network:
    """Measured with an all-gather of nearly nothing and of much. A `TransportError` on all ranks where multicast fails."""
    size = max(min(PROBE_BYTES // trial.dtype.itemsize, trial.size), 1)
    workers = range(len(members))
    alone = [[worker] for worker in workers]
    latency_s = _exchange_seconds(comm, members, alone, 1, trial.dtype, interface)
    whole_s = _exchange_seconds(comm, members, alone, size, trial.dtype, interface)
    received, moving_s = (len(members) - 1) * size * trial.dtype.itemsize, max(whole_s - latency_s, 0.1 * whole_s)
    return Network(latency_s, received / moving_s if received and moving_s else float("inf"))


def _exchange_seconds(comm: Comm, members: Sequence[Sequence[int]], owners: Sequence[Sequence[int]], size: int,
                      dtype: np.dtype, interface: str) -> float:
    """Of one all-reduce by multicast between these groups of workers."""
    leading = comm.rank in [ranks[0] for ranks in members]
    leaders = comm.Create([ranks[0] for ranks in members] if leading else [comm.rank])
    exchange = None
    with agreed(comm):
        if leading:
            exchange = ReplicatedMulticast(leaders, owners, size, dtype, 2, interface)
    seconds = _timed(comm, lambda: exchange is not None and exchange(np.zeros(size, dtype)))
    if exchange is not None:
        exchange.Free()
    return seconds
