"""Measure redundant gradients: the bytes that each scheme sends, as counted and as predicted, and its seconds.

Each rank is a worker. A scheme is one sum of gradients, or, for the published code, one exchange of all block gradients. Bytes
are told three ways: payload sent once, payload with a copy for each receiver, and what the busiest link carries, with headers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from mpiddl.coding.loads import Load, mds, published, replicate_and_slice, replicate_and_slice_unicast, ring_allreduce
from mpiddl.coding.mds_code import MdsCode
from mpiddl.coding.placements import cyclic, replicated_groups
from mpiddl.coding.subset_code import SubsetCode
from mpiddl.collectives import allreduce
from mpiddl.collectives.allreduce_mds_multicast import MdsMulticast
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
    """One exchange: its name, what it does, what it should send, and what gives its memory back. Loads are in bytes.

    late : of this rank: how many slices it has sent in place of late ranks, of so many bytes each.
    """

    name: str
    call: Callable[[], Any]
    load: Load
    free: Callable[[], None]
    late: Counter[int] = Counter()
    slice_bytes: int = 0


def run(env: Any, size: int, redundancies: Sequence[int], repeats: int, rate: str | None = None,
        with_published: bool = False) -> list[dict[str, Any]]:
    """Rows for each scheme, on rank 0; elsewhere none. ``size``: bytes of a gradient. Collective over ``COMM_WORLD``."""
    bits = read_rate(rate)
    with world(env) as link:
        redundancies = checked_redundancies(link, redundancies)
        elements, rows = max(size // KIND.itemsize, 1), []
        for scheme in _schemes(link, elements, redundancies, with_published):
            rows.append(_measured(link, scheme, repeats, elements * KIND.itemsize, bits))
            scheme.free()
        ring = rows[0]["seconds"]
        for row in rows:
            row.update(baseline_seconds=ring, ratio=ring / row["seconds"])
        return [] if link.rank else rows


def checked_redundancies(link: MpiComm, redundancies: Sequence[int]) -> Sequence[int]:
    """Those that were given, or else 1 to 4, as far as there are ranks. A `UsageError` on all ranks if there are too few."""
    if link.size < 2:
        raise UsageError("ranks: got 1, expected 2 or more; start this command with mpiexec")
    for redundancy in redundancies:
        if not 1 <= redundancy <= link.size:
            raise UsageError(f"redundancies: got {redundancy} with {link.size} ranks, expected whole numbers from 1 to "
                             f"{link.size}")
    return redundancies or range(1, min(link.size, 4) + 1)


def _schemes(link: MpiComm, size: int, redundancies: Sequence[int], with_published: bool) -> Any:
    """One at a time: each takes memory and a network port."""
    array, total, nbytes = np.ones(size, KIND), np.zeros(size, KIND), size * KIND.itemsize
    yield Scheme("ring", lambda: allreduce(link, array, total, algorithm="ring"), ring_allreduce(link.size, nbytes),
                 lambda: None)
    for redundancy in redundancies:
        owners = replicated_groups(link.size, redundancy).owners
        sliced = ReplicatedMulticast(link, owners, size, KIND)
        yield Scheme(f"slices by multicast, r={redundancy}", partial(sliced, array),
                     replicate_and_slice(link.size, redundancy, nbytes), sliced.Free, sliced.late,
                     replicate_and_slice(link.size, redundancy, nbytes).egress)
        ring = ReplicatedRing(link, owners, size, KIND)
        yield Scheme(f"slices in rings, r={redundancy}", partial(ring, array),
                     replicate_and_slice_unicast(link.size, redundancy, nbytes), ring.Free)
        if 1 < redundancy < link.size:
            coded = MdsMulticast(link, MdsCode(cyclic(link.size, redundancy), redundancy), size, KIND)
            load = Load(*(KIND.itemsize * elements for elements in mds(link.size, redundancy, size)))
            yield Scheme(f"mds by multicast, r={redundancy}", partial(summed, coded, array), load, coded.Free)
        if with_published:
            code = SubsetCode(link.size, redundancy)
            exchange = SubsetExchange(link, code, size)
            blocks = blocks_of(code, link.rank, size)
            load = Load(*(4 * words for words in published(link.size, redundancy, size, headers=True)))
            yield Scheme(f"published, r={redundancy}", partial(exchange, blocks), load, exchange.Free)


def summed(exchange: MdsMulticast, array: np.ndarray) -> np.ndarray:
    """The sum of as many blocks as there are, which all have this array."""
    for number in range(len(exchange.own)):
        exchange.bring(number, array)
    return exchange()


def blocks_of(code: SubsetCode, rank: int, words: int) -> dict[int, np.ndarray]:
    """Gradients of the blocks of a rank."""
    return {block: np.full(words, block, np.uint32) for block in code.placement.blocks[rank]}


def _measured(link: MpiComm, scheme: Scheme, repeats: int, nbytes: int, bits: float | None) -> dict[str, Any]:
    """The median of the slowest rank's seconds, and the bytes of one call."""
    scheme.call()
    taken = []
    link.Barrier()
    before, links, helped = link.meter.bytes, link_bytes(), scheme.late.total()
    for _ in range(repeats):
        link.Barrier()
        began = now()
        scheme.call()
        taken.append(max(link.setup_allgather(now() - began)))
    link.Barrier()
    carried = link_bytes().since(links)
    late = (scheme.late.total() - helped) * scheme.slice_bytes
    told = link.setup_allgather((link.meter.bytes - before, carried.sent_bytes, carried.received_bytes, late))
    sent, out, into = (sum(rank[0] for rank in told), max(rank[1] for rank in told), max(rank[2] for rank in told))
    load = scheme.load
    return {
        "case": f"n={link.size}", "contender": scheme.name, "baseline": "ring",
        "size_bytes": nbytes, "seconds": median(taken),
        "late_bytes": sum(rank[3] for rank in told) / repeats, "sent_once_bytes": sent / repeats,
        "formula_bytes": load.sent, "replicated_bytes": load.received,
        "link_out_bytes": out / repeats, "link_in_bytes": into / repeats, "formula_in_bytes": load.ingress,
        "limit_seconds": HEADERS * 8 * max(load.egress, load.ingress) / bits if bits else None,
    }


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
