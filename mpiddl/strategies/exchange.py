"""One round of gossip: arrays go to those that hear a rank, and it takes the weighted sum of its own and what it hears.

Cost: V bytes to each of those that hear it; where all weigh alike an all-reduce, 2(P-1)/P V. Memory: V for each rank that is
heard. All ranks add up in the order of ranks, so that two that average have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mpiddl.strategies.averages import average
from mpiddl.strategies.graphs import Hood
from mpiddl.transport.base import Comm

MIXED, TOLD = 1, 2
"""Tags."""


def blend(comm: Comm, array: np.ndarray, near: Hood) -> None:
    """``array`` (n,) becomes the weighted sum of the ranks'. Called by all that are in the round."""
    if near.uniform:
        average(comm, array)
        return
    theirs = _swapped(comm, array, near.sources, near.targets, MIXED)
    array *= near.own
    for rank, part in theirs.items():
        part *= near.sources[rank]
        array += part


def tell(comm: Comm, words: np.ndarray, near: Hood) -> dict[int, np.ndarray]:
    """The ``words`` (n,) of every rank that this one hears or is heard by; they get its own."""
    around = {*near.sources, *near.targets}
    return _swapped(comm, words, around, around, TOLD)


def _swapped(comm: Comm, array: np.ndarray, sources: Iterable[int], targets: Iterable[int], tag: int) -> dict[int, np.ndarray]:
    arrived = {source: np.empty_like(array) for source in sorted(sources)}
    under_way = [comm.Irecv(into, source, tag) for source, into in arrived.items()]
    under_way += [comm.Isend(array, target, tag) for target in sorted(targets)]
    for request in under_way:
        request.Wait()
    return arrived
