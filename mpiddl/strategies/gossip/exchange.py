"""One round of gossip: a rank sends its array to its targets and takes the weighted sum of its own array and those of its
sources.

Cost: V bytes to each target; with equal weights an all-reduce, 2(P-1)/P V. Memory: V for each source. All ranks add in the
order of ranks, so that two averaging ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mpiddl.strategies.gossip.graphs import Hood
from mpiddl.strategies.periodic.averages import average
from mpiddl.transport.comm import Comm

MIXED, TOLD = 1, 2
"""Tags."""


def blend(comm: Comm, array: np.ndarray, near: Hood) -> None:
    """Replace ``array`` (n,) by the weighted sum over the ranks. Called by all ranks of the round."""
    if near.uniform:
        average(comm, array, near.uniform)
        return
    theirs = _swapped(comm, array, near.sources, near.targets, MIXED)
    array *= near.own
    for rank, part in theirs.items():
        part *= near.sources[rank]
        array += part


def tell(comm: Comm, words: np.ndarray, near: Hood) -> dict[int, np.ndarray]:
    """Exchange ``words`` (n,) with all sources and targets. Returns theirs."""
    around = {*near.sources, *near.targets}
    return _swapped(comm, words, around, around, TOLD)


def _swapped(comm: Comm, array: np.ndarray, sources: Iterable[int], targets: Iterable[int], tag: int) -> dict[int, np.ndarray]:
    arrived = {source: np.empty_like(array) for source in sorted(sources)}
    under_way = [comm.Irecv(into, source, tag) for source, into in arrived.items()]
    under_way += [comm.Isend(array, target, tag) for target in sorted(targets)]
    for request in under_way:
        request.Wait()
    return arrived
