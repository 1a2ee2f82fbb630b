"""Measure steps of redundant computation, which is a wait, and an exchange, against what they should take.

The published scheme is measured with one sender at a time, on block gradients of which all together have the same size for each
redundancy. The sums of gradients are measured as they are used: all workers send at a time. One worker may be slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from mpiddl.bench.coded import KIND, blocks_of, checked_redundancies
from mpiddl.coding.choose_owners import senders
from mpiddl.coding.loads import groups, mds, replicate_and_slice
from mpiddl.coding.mds_code import MdsCode
from mpiddl.coding.placements import cyclic, replicated_groups
from mpiddl.coding.step_times import published_seconds
from mpiddl.coding.subset_code import SubsetCode
from mpiddl.collectives import broadcast
from mpiddl.collectives.allreduce_mds_multicast import MdsMulticast
from mpiddl.collectives.allreduce_replicated_multicast import ReplicatedMulticast
from mpiddl.collectives.exchange_subset_code import SubsetExchange
from mpiddl.machine.clock import now
from mpiddl.transport.mpi import MpiComm, world

SLOW_RANK = 1


def law(env: Any, total: int, ratio: float, redundancies: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Rows for the law of the published scheme, on rank 0: a wait of r T_calc, and an exchange with one sender at a time.

    Parameters
    ----------
    total : int
        Bytes of all block gradients together.
    ratio : float
        T_comm / T_calc. T_comm is measured: all block gradients to all others by unicast, one sender at a time.
    """
    with world(env) as link:
        redundancies = checked_redundancies(link, redundancies)
        calc_s, rows = _unicast_seconds(link, total, repeats) / ratio, []

        def row(name: str, redundancy: int, exchange: Callable[[], Any], predicted: float) -> None:
            seconds = _steps(link, repeats, redundancy * calc_s, exchange)
            rows.append(_row(link, ratio, name, total, seconds, predicted, calc_s))

        whole = np.zeros(max(total // link.size, 1), np.uint8)
        row("multicast, not coded", 1, lambda: _in_turn(link, whole), 1 + ratio / (link.size - 1))
        for redundancy in redundancies:
            code = SubsetCode(link.size, redundancy)
            words = max(total // 4 // len(code.placement.owners), 1)
            exchange, blocks = SubsetExchange(link, code, words, turns=True), blocks_of(code, link.rank, words)
            row(f"published, r={redundancy}", redundancy, lambda: exchange(blocks),  # noqa: B023
                published_seconds(link.size, redundancy, 1.0, ratio))
            exchange.Free()
        return [] if link.rank else rows


def _in_turn(link: MpiComm, block: np.ndarray) -> None:
    """One block of each rank to all others."""
    for root in range(link.size):
        broadcast(link, block, root, algorithm="multicast")


def _unicast_seconds(link: MpiComm, total: int, repeats: int) -> float:
    """T_comm: every block gradient, one a worker, to all others by unicast, one sender at a time."""
    gradient, taken = np.zeros(max(total // link.size, 1), np.uint8), []
    for _ in range(1 + repeats):
        link.Barrier()
        began = now()
        for sender in range(link.size):
            if link.rank == sender:
                for other in range(link.size):
                    if other != sender:
                        link.Send(gradient, other)
            else:
                link.Recv(gradient, sender)
            link.Barrier()
        taken.append(max(link.setup_allgather(now() - began)))
    return median(taken[1:])


def _steps(link: MpiComm, repeats: int, calc_s: float, exchange: Callable[[], Any]) -> float:
    """Median seconds of the slowest rank, for a wait and an exchange."""
    exchange()
    taken = []
    for _ in range(repeats):
        link.Barrier()
        began = now()
        time.sleep(calc_s)
        exchange()
        taken.append(max(link.setup_allgather(now() - began)))
    return median(taken)


def sums(env: Any, size: int, ratio: float, redundancies: Sequence[int], repeats: int, slow: float) -> list[dict[str, Any]]:
    """Rows for sums of gradients over multicast, on rank 0: without redundancy, with slices, and with the MDS code.

    Parameters
    ----------
    size : int
        Bytes of a gradient.
    ratio : float
        T_comm / T_calc. T_comm is measured: the sum over multicast without redundancy.
    slow : float
        Rank 1 takes so many times as long to compute; with 2 or more, the others should not wait for it, and figures are those
        of the others.
    """
    with world(env) as link:
        redundancies = checked_redundancies(link, redundancies)
        elements = max(size // KIND.itemsize, 1)
        nbytes, rows = elements * KIND.itemsize, []
        plain = _Sliced(link, 1, elements)
        comm_s = _steps(link, repeats, 0.0, plain.at_once)
        calc_s, each_s = comm_s / ratio, comm_s / (link.size - 1)
        seconds = plain.train(repeats, calc_s, slow)
        rows.append(_row(link, ratio, plain.name, nbytes, seconds,
                         max(1 + ratio, slow + ratio / (link.size - 1)), calc_s))
        plain.free()
        for way, computed, received in _ways(link, redundancies, elements, slow):
            predicted = computed + received * each_s / calc_s
            rows.append(_row(link, ratio, way.name, nbytes, way.train(repeats, calc_s, slow), predicted, calc_s))
            way.free()
        for row in rows:
            row["saved"] = 1 - row["seconds"] / rows[0]["seconds"]
        return [] if link.rank else rows


def _ways(link: MpiComm, redundancies: Sequence[int], elements: int, slow: float) -> Iterator[tuple[Any, float, float]]:
    """Each way with the blocks that it computes, in units of T_calc, and what it receives, in gradients."""
    late = int(slow >= 2)
    for redundancy in redundancies:
        if redundancy == 1:
            continue
        count = groups(link.size, redundancy)
        least = 1 if late and count > 1 else 0
        load = replicate_and_slice(link.size, redundancy, elements)
        yield _Sliced(link, redundancy, elements), link.size / count, max(load.ingress / elements, least)
        if redundancy < link.size and redundancy > late:
            code = MdsCode(cyclic(link.size, redundancy), redundancy - late)
            finished = [() if late and worker == SLOW_RANK else its for worker, its in enumerate(code.placement.blocks)]
            load = mds(link.size, code.slices, elements, len(senders(code.choose(finished) or ())))
            yield _Coded(link, code, elements), redundancy, load.ingress / elements


class _Sliced:
    """Replicate-and-slice."""

    def __init__(self, link: MpiComm, redundancy: int, elements: int):
        owners = replicated_groups(link.size, redundancy).owners
        self.name = f"slices, r={redundancy}" if redundancy > 1 else "no redundancy"
        self._link, self._parts = link, link.size / len(owners)
        self._exchange, self._array = ReplicatedMulticast(link, owners, elements, KIND), np.ones(elements, KIND)
        self._wanted, self.free = float(len(owners)), self._exchange.Free

    def at_once(self) -> None:
        self._exchange(self._array)

    def train(self, repeats: int, calc_s: float, slow: float) -> float:
        seconds = self._parts * calc_s * (slow if self._link.rank == SLOW_RANK else 1)

        def step() -> np.ndarray:
            if self._exchange.begun(seconds):
                return self._exchange(None)
            time.sleep(seconds)
            return self._exchange(self._array)

        return _in_a_row(self._link, repeats, step, self._wanted, slow)


class _Coded:
    """The MDS code."""

    def __init__(self, link: MpiComm, code: MdsCode, elements: int):
        redundancy = code.placement.redundancy
        late = redundancy - code.slices
        self.name = f"mds, r={redundancy}" + (f", stragglers={late}" if late else "")
        self._link, self._array = link, np.ones(elements, KIND)
        self._exchange = MdsMulticast(link, code, elements, KIND)
        self.free = self._exchange.Free

    def train(self, repeats: int, calc_s: float, slow: float) -> float:
        seconds = calc_s * (slow if self._link.rank == SLOW_RANK else 1)

        def step() -> np.ndarray:
            for number in range(len(self._exchange.own)):
                if not self._exchange.needs():
                    break
                time.sleep(seconds)
                self._exchange.bring(number, self._array)
            return self._exchange()

        return _in_a_row(self._link, repeats, step, float(self._link.size), slow)


def _in_a_row(link: MpiComm, repeats: int, step: Callable[[], np.ndarray], wanted: float, slow: float) -> float:
    """Median seconds of steps without barriers between them, of the slowest rank that is not slow; the sums are looked at."""
    step()
    link.Barrier()
    taken = []
    for _ in range(repeats):
        began = now()
        found = step()
        taken.append(now() - began)
        assert np.allclose(found[:: max(found.size // 100, 1)], wanted, rtol=1e-5)
    others = [each for rank, each in enumerate(link.setup_allgather(median(taken))) if slow < 2 or rank != SLOW_RANK]
    return max(others)


def _row(link: MpiComm, ratio: float, name: str, nbytes: int, seconds: float, predicted: float,
         calc_s: float) -> dict[str, Any]:
    return {"case": f"n={link.size}, T_comm={ratio:g} T_calc", "contender": name, "baseline": "law", "size_bytes": nbytes,
            "seconds": seconds, "baseline_seconds": predicted * calc_s, "ratio": predicted * calc_s / seconds,
            "in_t_calc": seconds / calc_s, "predicted": predicted}
