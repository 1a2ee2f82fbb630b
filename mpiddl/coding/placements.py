"""Which workers compute which blocks of the rows, when each block is computed by several workers.

n workers, redundancy r: each block is computed by at least r workers, its owners. The three placements differ in the number of
blocks, and so in what coding can do with them.

===============  =================  ===============================  ====================================================
placement        blocks             blocks of a worker               owners of a block
===============  =================  ===============================  ====================================================
all subsets      C(n, r)            C(n-1, r-1)                      each set of r workers owns one block
groups           floor(n/r)         1                                the workers of one group, r of them or a few more
cyclic           n                  r                                worker b and the r - 1 workers after it, in a ring
===============  =================  ===============================  ====================================================

Sources: all subsets, Li, Maddah-Ali & Avestimehr, IEEE Trans. Inf. Theory 64(1), 2018, arXiv:1604.07086 (coded MapReduce);
groups (fractional repetition) and cyclic, Tandon et al., ICML 2017, arXiv:1612.03301, sections 4 and 5. Blocks in proportion to
speeds: ours, a linear program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.layout import block

MOST_BLOCKS = 100_000
"""A placement with more blocks than that has blocks of no row."""


@dataclass(frozen=True)
class BlockPlacement:
    """The workers that compute each block: ``owners[b]``, ascending, for block b."""

    workers: int
    owners: tuple[tuple[int, ...], ...]

    @cached_property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """The blocks that each worker computes, ascending."""
        found: list[list[int]] = [[] for _ in range(self.workers)]
        for number, owners in enumerate(self.owners):
            for worker in owners:
                found[worker].append(number)
        return tuple(map(tuple, found))

    @property
    def redundancy(self) -> int:
        """Number of workers that compute each block, at least."""
        return min(map(len, self.owners))


def all_subsets(workers: int, redundancy: int) -> BlockPlacement:
    """One block for each set of ``redundancy`` workers.

    Examples
    --------
    >>> all_subsets(3, 2).owners, all_subsets(3, 2).blocks
    (((0, 1), (0, 2), (1, 2)), ((0, 1), (0, 2), (1, 2)))
    """
    check_redundancy(workers, redundancy)
    if (count := comb(workers, redundancy)) > MOST_BLOCKS:
        raise UsageError(f"redundancy: got {redundancy} with {workers} workers, which makes {count} blocks, expected at most "
                         f"{MOST_BLOCKS} blocks")
    return BlockPlacement(workers, tuple(combinations(range(workers), redundancy)))


def replicated_groups(workers: int, redundancy: int) -> BlockPlacement:
    """One block for each of floor(workers / redundancy) groups of workers, whose sizes differ by one at most.

    Examples
    --------
    >>> replicated_groups(5, 2).owners
    ((0, 1, 2), (3, 4))
    """
    check_redundancy(workers, redundancy)
    groups = workers // redundancy
    return BlockPlacement(workers, tuple(tuple(block(workers, groups, group)) for group in range(groups)))


def cyclic(workers: int, redundancy: int) -> BlockPlacement:
    """As many blocks as workers; worker w computes block w and the ``redundancy`` - 1 blocks before it, in a ring.

    Examples
    --------
    >>> cyclic(4, 2).owners
    ((0, 1), (1, 2), (2, 3), (0, 3))
    """
    check_redundancy(workers, redundancy)
    rings = (sorted((first + turn) % workers for turn in range(redundancy)) for first in range(workers))
    return BlockPlacement(workers, tuple(map(tuple, rings)))


SLOWEST = 1e-6
"""Of the speed of the fastest worker; `shares` takes slower workers to be as fast."""


def check_redundancy(workers: int, redundancy: int) -> None:
    """Raise a `UsageError` unless 1 <= ``redundancy`` <= ``workers``."""
    if not isinstance(redundancy, (int, np.integer)) or not 1 <= redundancy <= workers:
        raise UsageError(f"redundancy: got {redundancy!r} with {workers} {'worker' if workers == 1 else 'workers'}, expected "
                         f"{f'a whole number from 1 to {workers}' if workers > 1 else 1}")


def shares(placement: BlockPlacement, speeds: Sequence[float]) -> np.ndarray:
    """The share of all rows for each block with which the slowest worker ends as soon as possible; they add up to 1.

    Parameters
    ----------
    speeds : sequence of float
        Rows in a second of each worker, in any unit. Equal speeds give equal shares where each worker has as many blocks.

    Examples
    --------
    >>> shares(replicated_groups(4, 2), [1.0, 1.0, 1.0, 3.0]).round(3).tolist()
    [0.5, 0.5]
    >>> shares(replicated_groups(4, 2), [1.0, 1.0, 3.0, 3.0]).round(3).tolist()
    [0.25, 0.75]
    """
    if len(speeds) != placement.workers or not all(0 < speed < float("inf") for speed in speeds):
        raise UsageError(f"speeds: got {list(speeds)}, expected {placement.workers} numbers above 0")
    count = len(placement.owners)
    if len(set(speeds)) == 1 and len(set(map(len, placement.blocks))) == 1:
        return np.full(count, 1 / count)
    from scipy.optimize import linprog

    # Minimise the seconds T, so that for each worker the sum of its shares is at most T times its speed.
    work = np.zeros((placement.workers, count + 1))
    for worker, mine in enumerate(placement.blocks):
        work[worker, list(mine)] = 1
    fastest = max(speeds)
    work[:, count] = [-max(speed / fastest, SLOWEST) for speed in speeds]
    cost, whole = np.append(np.zeros(count), 1.0), np.append(np.ones(count), 0.0)[None]
    found = linprog(cost, work, np.zeros(placement.workers), whole, [1.0], method="highs")
    return np.maximum(found.x[:count], 0.0) / np.maximum(found.x[:count], 0.0).sum()


def block_rows(rows: int, parts: np.ndarray) -> list[range]:
    """``rows`` in contiguous blocks of about these shares: each differs from its share by less than one row.

    Examples
    --------
    >>> block_rows(10, np.array([0.25, 0.75])), block_rows(2, np.full(4, 0.25))
    ([range(0, 2), range(2, 10)], [range(0, 0), range(0, 1), range(1, 1), range(1, 2)])
    """
    edges = np.floor(np.cumsum(parts) * rows + 0.5 - 1e-9).astype(int)
    edges[-1] = rows
    return [range(begin, end) for begin, end in zip([0, *edges.tolist()], edges.tolist(), strict=False)]
