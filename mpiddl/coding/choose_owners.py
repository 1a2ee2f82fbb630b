"""Which owners send each block, when some workers are late: as few senders as a greedy search finds, with about equal work.

Each block needs m owners that have finished it. Workers are left out one at a time, as long as every block still has m: those
that have finished least first. Fewer senders mean fewer bytes: if all owners of a block are needed, all n workers send. If one
may be late, n - 1 send with all subsets. Each block then goes to those of its owners that have the least work so far.

Cost: blocks x workers operations; no communication. All ranks choose the same from the same input.
Source: ours. The least number of senders is a problem of set cover, for which no fast exact algorithm is known.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from mpiddl.coding.placements import BlockPlacement
from mpiddl.errors import UsageError

Chosen = tuple[tuple[int, ...], ...]
"""For each block the owners that send it, ascending."""


def choose_owners(placement: BlockPlacement, needed: int, finished: Sequence[Collection[int]] | None = None) -> Chosen | None:
    """Choose ``needed`` owners for each block, among those that have finished it.

    Parameters
    ----------
    needed : int
        Owners for each block, m.
    finished : sequence of collections of int, optional
        The blocks that each worker has finished. By default each worker has finished all of its blocks.

    Returns
    -------
    Chosen or None
        None if some block has too few owners that have finished it: the step must wait for more.

    Raises
    ------
    UsageError
        If ``finished`` has not one entry for each worker, or a block that the worker does not compute.

    Examples
    --------
    >>> from mpiddl.coding.placements import all_subsets
    >>> choose_owners(all_subsets(3, 2), 1)  # worker 2 is not needed
    ((0,), (0,), (1,))
    >>> choose_owners(all_subsets(3, 2), 1, [{0}, {0}, {1, 2}])  # workers 0 and 1 have finished one block of two
    ((0,), (2,), (2,))
    >>> choose_owners(all_subsets(3, 2), 1, [{0}, {0}, ()])
    """
    done = _finished_matrix(placement, placement.blocks if finished is None else finished)
    if (done.sum(1) < needed).any():
        return None
    _leave_out(done, needed)
    work = [0] * placement.workers
    chosen: list[tuple[int, ...]] = [()] * len(done)
    for block in np.argsort(done.sum(1), kind="stable").tolist():  # those with the least choice first
        ready = sorted(np.flatnonzero(done[block]).tolist(), key=lambda worker: (work[worker], worker))
        chosen[block] = tuple(sorted(ready[:needed]))
        for worker in chosen[block]:
            work[worker] += 1
    return tuple(chosen)


def _finished_matrix(placement: BlockPlacement, finished: Sequence[Collection[int]]) -> np.ndarray:
    """Which worker (column) has finished which block (row)."""
    if len(finished) != placement.workers:
        raise UsageError(f"finished: got the blocks of {len(finished)} workers, expected those of {placement.workers}")
    done = np.zeros((len(placement.owners), placement.workers), bool)
    for worker, (blocks, own) in enumerate(zip(finished, placement.blocks, strict=True)):
        if strange := sorted(set(blocks) - set(own)):
            raise UsageError(f"finished: got block {strange[0]} of worker {worker}, expected some of {list(own)}")
        done[list(blocks), worker] = True
    return done


def _leave_out(done: np.ndarray, needed: int) -> None:
    """Take workers that are not needed out of ``done``; of two that have finished as much, the higher one first."""
    counts = done.sum(1)
    for worker in sorted(range(done.shape[1]), key=lambda worker: (done[:, worker].sum(), -worker)):
        if (counts - done[:, worker] >= needed).all():
            counts -= done[:, worker]
            done[:, worker] = False


def senders(chosen: Chosen) -> list[int]:
    """The workers that are chosen for some block, ascending.

    Examples
    --------
    >>> senders(((0, 2), (2, 3)))
    [0, 2, 3]
    """
    return sorted(set().union(*chosen))
