"""Measure redundant gradients: the bytes that each scheme sends, as counted and as predicted, and its seconds.

Each rank is a worker. A scheme is one sum of gradients, or, for the published code, one exchange of all block gradients. Bytes
are told three ways: payload sent once, payload with a copy for each receiver, and what the busiest link carries, with headers.
The law of the published scheme is measured with one sender at a time, on block gradients of which all together have the same
size for each redundancy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from mpiddl.coding.loads import Load, published, replicate_and_slice, replicate_and_slice_unicast, ring_allreduce
from mpiddl.coding.placements import replicated_groups
from mpiddl.coding.step_times import published_seconds
from mpiddl.coding.subset_code import SubsetCode
from mpiddl.collectives import allreduce
from mpiddl.collectives.allreduce_replicated_multicast import ReplicatedMulticast
from mpiddl.collectives.allreduce_replicated_ring import ReplicatedRing
from mpiddl.collectives.exchange_subset_code import SubsetExchange
from mpiddl.errors import UsageError
from mpiddl.machine.clock import now
from mpiddl.machine.link_counters import link_bytes
from mpiddl.testbed.plan import read_rate
from mpiddl.transport.mpi import MpiComm, world

HEADERS = 1.046
"""Bytes on a link beside the payload, with datagrams of 1,500 bytes."""

KIND = np.dtype(np.float32)


class Scheme(NamedTuple):
    """One exchange: its name, what it does, what it should send, and what gives its memory back. Loads are in bytes."""

    name: str
    call: Callable[[], Any]
    load: Load
    free: Callable[[], None]


def run(env: Any, size: int, redundancies: Sequence[int], repeats: int, rate: str | None = None,
        with_published: bool = False) -> list[dict[str, Any]]:
    """Rows for each scheme, on rank 0; elsewhere none. ``size``: bytes of a gradient. Collective over ``COMM_WORLD``."""
    bits = read_rate(rate)
    with world(env) as link:
        _check(link, redundancies)
        elements, rows = max(size // KIND.itemsize, 1), []
        for scheme in _schemes(link, elements, redundancies, with_published):
            rows.append(_measured(link, scheme, repeats, elements * KIND.itemsize, bits))
            scheme.free()
        ring = rows[0]["seconds"]
        for row in rows:
            row.update(baseline_seconds=ring, ratio=ring / row["seconds"])
        return [] if link.rank else rows


def _check(link: MpiComm, redundancies: Sequence[int]) -> None:
    if link.size < 2:
        raise UsageError("ranks: got 1, expected 2 or more; start this command with mpiexec")
    for redundancy in redundancies:
        if not 1 <= redundancy <= link.size:
            raise UsageError(f"redundancies: got {redundancy} with {link.size} ranks, expected whole numbers from 1 to "
                             f"{link.size}")


def _schemes(link: MpiComm, size: int, redundancies: Sequence[int], with_published: bool) -> Any:
    """One at a time: each takes memory and a network port."""
    array, total, nbytes = np.ones(size, KIND), np.zeros(size, KIND), size * KIND.itemsize
    yield Scheme("ring", lambda: allreduce(link, array, total, algorithm="ring"), ring_allreduce(link.size, nbytes),
                 lambda: None)
    for redundancy in redundancies:
        owners = replicated_groups(link.size, redundancy).owners
        sliced = ReplicatedMulticast(link, owners, size, KIND)
        yield Scheme(f"multicast, r={redundancy}", partial(sliced, array),
                     replicate_and_slice(link.size, redundancy, nbytes), sliced.Free)
        ring = ReplicatedRing(link, owners, size, KIND)
        yield Scheme(f"rings, r={redundancy}", partial(ring, array),
                     replicate_and_slice_unicast(link.size, redundancy, nbytes), ring.Free)
        if with_published:
            code = SubsetCode(link.size, redundancy)
            exchange = SubsetExchange(link, code, size)
            blocks = _blocks(code, link.rank, size)
            load = Load(*(4 * words for words in published(link.size, redundancy, size, headers=True)))
            yield Scheme(f"published, r={redundancy}", partial(exchange, blocks), load, exchange.Free)


def _blocks(code: SubsetCode, rank: int, words: int) -> dict[int, np.ndarray]:
    return {block: np.full(words, block, np.uint32) for block in code.placement.blocks[rank]}


def _measured(link: MpiComm, scheme: Scheme, repeats: int, nbytes: int, bits: float | None) -> dict[str, Any]:
    """The median of the slowest rank's seconds, and the bytes of one call."""
    scheme.call()
    taken = []
    link.Barrier()
    before, links = link.meter.bytes, link_bytes()
    for _ in range(repeats):
        link.Barrier()
        began = now()
        scheme.call()
        taken.append(max(link.setup_allgather(now() - began)))
    link.Barrier()
    carried = link_bytes().since(links)
    told = link.setup_allgather((link.meter.bytes - before, carried.sent_bytes, carried.received_bytes))
    sent, out, into = (sum(rank[0] for rank in told), max(rank[1] for rank in told), max(rank[2] for rank in told))
    load = scheme.load
    return {
        "case": f"n={link.size}", "contender": scheme.name, "baseline": "ring",
        "size_bytes": nbytes, "seconds": median(taken),
        "sent_once_bytes": sent / repeats, "formula_bytes": load.sent, "replicated_bytes": load.received,
        "link_out_bytes": out / repeats, "link_in_bytes": into / repeats, "formula_in_bytes": load.ingress,
        "limit_seconds": HEADERS * 8 * max(load.egress, load.ingress) / bits if bits else None,
    }


def law(env: Any, total: int, ratio: float, redundancies: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Rows for the law of the published scheme, on rank 0: steps of a wait and an exchange with one sender at a time.

    Parameters
    ----------
    total : int
        Bytes of all block gradients together.
    ratio : float
        T_comm / T_calc.
    """
    with world(env) as link:
        _check(link, redundancies)
        comm_s = _unicast_seconds(link, total, repeats)
        calc_s, rows = comm_s / ratio, []
        for redundancy in redundancies:
            code = SubsetCode(link.size, redundancy)
            words = max(total // 4 // len(code.placement.owners), 1)
            exchange, blocks = SubsetExchange(link, code, words, turns=True), _blocks(code, link.rank, words)
            exchange(blocks)
            taken = []
            for _ in range(repeats):
                link.Barrier()
                began = now()
                time.sleep(redundancy * calc_s)  # the computation
                exchange(blocks)
                taken.append(max(link.setup_allgather(now() - began)))
            exchange.Free()
            predicted = published_seconds(link.size, redundancy, 1.0, ratio)
            rows.append({"case": f"n={link.size}, T_comm={ratio:g} T_calc", "contender": f"r={redundancy}",
                         "baseline": "law", "size_bytes": total, "seconds": median(taken),
                         "baseline_seconds": predicted * calc_s, "ratio": predicted * calc_s / median(taken),
                         "in_t_calc": median(taken) / calc_s, "predicted": predicted})
        return [] if link.rank else rows


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


def draw(file: Path, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bytes of each scheme: sent once, with a copy for each receiver, and on the busiest link."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    kinds = {"replicated_bytes": "with a copy for each receiver", "sent_once_bytes": "sent once",
             "link_in_bytes": "into the busiest link"}
    for place, (key, label) in enumerate(kinds.items()):
        axes.barh([number + 0.25 * (place - 1) for number in range(len(rows))], [row.get(key, 0) / 1e6 for row in rows], 0.25,
                  label=label)
    axes.set_yticks(range(len(rows)), [str(row["contender"]) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("MB")
    axes.set_title(f"{title}, {rows[0]['case']}, gradients of {rows[0]['size_bytes'] / 1e6:.3g} MB")
    axes.legend()
    figure.savefig(file)
