"""How long vectors lie on the ranks: whole on each, which works without a message, or each rank with a slice of the entries.

What every rank does for itself with d x m numbers does not get faster with more ranks. Slices share it, and the memory that
it takes, for a reduce-scatter and an all-gather in the place of an all-reduce, which is as many bytes, and for sums of small
matrices over ranks. Slices are of equal length; behind the end of the last are zeros, which stay zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from mpiddl import kernels
from mpiddl.collectives import allgather, reduce_scatter
from mpiddl.decomposition.rows.sums import allreduce
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm

SLICED_FROM = 1 << 17
"""Numbers in a block from which on slices are worth their messages."""


class Spread(Protocol):
    """Blocks of vectors of ``d`` entries, of which this rank has ``rows``; methods are collective unless they say so."""

    comm: Comm
    d: int
    rows: int

    def sum(self, part: np.ndarray) -> np.ndarray:
        """What all entries give, of the small array that this rank's give; sliced, to the bit the same on every rank."""

    def decided(self, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, called with the same small matrices on every rank; where a slice is treated by it, rank 0's."""

    def same(self, block: np.ndarray) -> np.ndarray:
        """``block`` as rank 0 has it, where ranks that have all of it do not agree."""

    def own(self, whole: np.ndarray) -> np.ndarray:
        """This rank's part of (d,) or (d, k). Local."""

    def whole(self, own: np.ndarray) -> np.ndarray:
        """All parts of (d, k)."""

    def random(self, columns: int, seed: int) -> np.ndarray:
        """This rank's part of a normally distributed block. Local."""

    def reduced(self, block: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums over ranks: of a whole ``block`` (d, k), each its part of that, and of ``rest`` (any,), all of that."""


def of_rank_0(comm: Comm, make: Callable[[], Any]) -> Any:
    """What ``make`` gives on rank 0, on every rank; so is an eigenproblem that has no solution raised.

    Communication
    -------------
    Collective: a broadcast.
    """
    made, failure = None, None
    if comm.rank == 0:
        try:
            made = make()
        except np.linalg.LinAlgError as error:
            failure = error
    made, failure = comm.bcast((made, failure))
    if failure is not None:
        raise failure
    return made


def spread_for(comm: Comm, d: int, columns: int) -> Spread:
    """What suits blocks of so many columns."""
    return Slices(comm, d) if comm.size > 1 and d * columns >= SLICED_FROM else Whole(comm, d)


def _checksum(block: np.ndarray) -> int:
    return int(kernels.checksum.checksum(np.ascontiguousarray(block).reshape(-1).view(np.uint64)))


class Whole:
    """Every rank has everything, and works on it as the others do."""

    def __init__(self, comm: Comm, d: int):
        self.comm, self.d, self.rows = comm, d, d

    def sum(self, part: np.ndarray) -> np.ndarray:
        return part

    def decided(self, make: Callable[[], Any]) -> Any:
        return make()

    def same(self, block: np.ndarray) -> np.ndarray:
        # What is left of a direction after projections may be mostly rounding: a last bit's difference would grow with it.
        if self.comm.size == 1 or len(set(self.comm.allgather((block.shape, _checksum(block))))) == 1:
            return block
        return self.comm.bcast(block)

    def own(self, whole: np.ndarray) -> np.ndarray:
        return whole

    def whole(self, own: np.ndarray) -> np.ndarray:
        return own

    def random(self, columns: int, seed: int) -> np.ndarray:
        return np.random.default_rng([seed, 0]).standard_normal((self.d, columns))

    def reduced(self, block: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        message = np.concatenate([block.reshape(-1), rest])
        allreduce(self.comm, IN_PLACE, message)
        return message[: block.size].reshape(block.shape), message[block.size :]


class Slices:
    """Every rank has ceil(d / P) entries of each vector."""

    def __init__(self, comm: Comm, d: int):
        self.comm, self.d, self.rows = comm, d, -(-d // comm.size)

    def sum(self, part: np.ndarray) -> np.ndarray:
        total = np.empty(part.shape)
        allreduce(self.comm, np.ascontiguousarray(part), total)
        return total

    def decided(self, make: Callable[[], Any]) -> Any:
        return of_rank_0(self.comm, make)

    def same(self, block: np.ndarray) -> np.ndarray:
        return block

    def own(self, whole: np.ndarray) -> np.ndarray:
        some = whole[self.rows * self.comm.rank : self.rows * (self.comm.rank + 1)]
        return np.concatenate([some, np.zeros((self.rows - len(some), *whole.shape[1:]))])

    def whole(self, own: np.ndarray) -> np.ndarray:
        result = np.empty((self.rows * self.comm.size, own.shape[1]))
        allgather(self.comm, np.ascontiguousarray(own), result)
        return result[: self.d]

    def random(self, columns: int, seed: int) -> np.ndarray:
        block = np.random.default_rng([seed, 0, self.comm.rank]).standard_normal((self.rows, columns))
        block[max(0, self.d - self.rows * self.comm.rank) :] = 0
        return block

    def reduced(self, block: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k, own = block.shape[1], np.empty((self.rows, block.shape[1]))
        padding = np.zeros((self.rows * self.comm.size - self.d, k))
        reduce_scatter(self.comm, np.concatenate([block, padding]) if len(padding) else np.ascontiguousarray(block), own)
        return own, self.sum(rest)
