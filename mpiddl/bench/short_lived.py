"""Communicators that are soon freed: ten times one is made, makes one ``Allreduce`` and is freed, by the library and by ours.

The two take turns on the same arrays. A row holds, beside what every bench's rows hold, ``p10`` and ``p90`` of our seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpiddl.bench.collectives import check_memory, size_text
from mpiddl.node.topology import neighbours
from mpiddl.study.interleaved import Contender, quantiles, take_turns
from mpiddl.transport.mpi import MpiComm, world
from mpiddl.tuning.rule import LIBRARY

OURS = "Communicator"

TIMES = 10

WAYS: dict[str, Callable[[Any], Any]] = {"Dup": lambda comm: comm.Dup(), "Split": lambda comm: comm.Split(0, comm.Get_rank())}


def run(env: Any, sizes: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Rows for every way to make a communicator and every size (bytes), on rank 0; elsewhere none.

    Communication
    -------------
    Collective over ``COMM_WORLD``.
    """
    with world(env) as link:
        check_memory(link, max(sizes))
        from mpiddl.communicator import Communicator

        makers = {OURS: Communicator(link.raw), LIBRARY: link.raw}
        rows = [row for way in WAYS for size in sizes for row in _case(link, makers, way, size, seconds)]
        return [] if link.rank else rows


def _case(link: MpiComm, makers: dict[str, Any], way: str, size: int, seconds: float) -> Iterator[dict[str, Any]]:
    source = np.ones(max(1, size // 4), np.float32)
    result = np.zeros_like(source)
    contenders = {name: Contender(partial(_use, WAYS[way], comm, source, result)) for name, comm in makers.items()}
    take_turns(link, contenders, seconds)
    low, median, high = quantiles(contenders[OURS].seconds)
    baseline = quantiles(contenders[LIBRARY].seconds)[1]
    yield {
        "case": f"{TIMES} x {way}, Allreduce {size_text(size)}, Free, {neighbours(link).topology}", "contender": OURS,
        "baseline": LIBRARY, "size_bytes": size, "seconds": median, "baseline_seconds": baseline, "ratio": baseline / median,
        "p10": low, "p90": high,
    }  # fmt: skip


def _use(make: Callable[[Any], Any], comm: MpiComm, source: np.ndarray, result: np.ndarray) -> None:
    for _ in range(TIMES):
        made = make(comm)
        made.Allreduce(source, result)
        made.Free()
