"""Coded synchronous SGD as it was published: every worker gets the gradient of every block, from coded multicast packets.

Each set of r workers computes one block of the batch. A packet gives each of r workers another piece of a gradient that it
lacks. Gradients are sent as 32-bit integers on a clip range, and added up in 64 bits, so that all workers have the same sum;
with ``xor=1`` their floats are sent unchanged.

Cost a step, V = bytes of the gradient, n workers: r times the computation, C(n-1, r) V/r sent by each worker, C(n, r) V/r
(n - r) in all; memory for all C(n, r) block gradients. That is more than `coded-sum` sends, and pays only where each worker
needs the gradients of single blocks.
Source: see `mpiddl.coding.subset_code` and `mpiddl.coding.clip_quantisation`. All ranks are workers, wherever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

from mpiddl.coding.clip_quantisation import CLIP, add_quantised, dequantise, quantise
from mpiddl.coding.placements import all_subsets, check_redundancy
from mpiddl.coding.subset_code import SubsetCode, as_words
from mpiddl.collectives.copies import check_same, checksum
from mpiddl.collectives.exchange_subset_code import SubsetExchange
from mpiddl.errors import DIVERGED, ConvergenceError, DataError, UsageError
from mpiddl.layout import DEFAULT_SHARDS, ceil_div
from mpiddl.memory import aligned_zeros
from mpiddl.strategies.base import Combined, Placement, Replica, Step, Strategy, check_numbers
from mpiddl.transport.comm import Comm

MOST_CLIP = 1e200
"""Of a mean; the bound of a sum is larger."""


@dataclass(frozen=True)
class Coded(Strategy):
    """Send the gradients of all blocks to all workers by coded multicast, and apply their sum.

    redundancy : workers that compute each block.
    clip : bound of the range that elements of a block's mean gradient are clipped to.
    xor : 1: no clipping and no rounding; floats are combined bit by bit.
    turns : 1: one worker sends at a time.
    interface : network interface for multicast, by name, address or network.
    """

    sums_gradients = True

    redundancy: int = 2
    clip: float = CLIP
    xor: int = 0
    turns: int = 0
    interface: str = ""

    def __post_init__(self) -> None:
        check_numbers(self)
        if not 0 < self.clip <= MOST_CLIP:
            raise UsageError(f"strategy coded: clip: got {self.clip}, expected a number above 0 and at most {MOST_CLIP:g}")
        for name in ("xor", "turns"):
            if (got := getattr(self, name)) not in (0, 1):
                raise UsageError(f"strategy coded: {name}: got {got}, expected 0 or 1")

    def check(self, size: int) -> None:
        check_redundancy(size, self.redundancy)
        all_subsets(size, self.redundancy)

    def shards(self, size: int) -> int:
        count = comb(size, self.redundancy)
        return count * ceil_div(DEFAULT_SHARDS, count)

    def blocks(self, shards: int, rank: int, size: int) -> Sequence[Sequence[int]]:
        placement = all_subsets(size, self.redundancy)
        return [range(number, shards, len(placement.owners)) for number in placement.blocks[rank]]

    def placement(self, shards: int, rank: int, size: int) -> Placement:
        owners = all_subsets(size, self.redundancy).owners
        mine = [shard for part in self.blocks(shards, rank, size) for shard in part]
        own = [number % self.redundancy for number in range(len(owners))]
        scored = [shard for number in range(len(owners)) if owners[number][own[number]] == rank
                  for shard in range(number, shards, len(owners))]
        return Placement(mine, scores=scored)

    def combine_block(self, comm: Comm, state: Any, grad: np.ndarray, number: int, step: Step) -> Any:
        try:
            self._way(comm, grad.size, grad.dtype).keep(number, grad, step.total)
        except DataError:
            raise ConvergenceError(f"step {step.index + 1}: the gradient is not finite: {DIVERGED} at rate {step.rate:g}; try "
                                   "a smaller `rate`, a `warmup`, or `clip`") from None
        return state

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        return Combined(self._way(comm, grad.size, grad.dtype).sum(step.total), step.total, state)

    def note(self, comm: Comm, size: int, dtype: np.dtype) -> str:
        way = self._way(comm, size, dtype)
        how = f"by MPI, because multicast does not work: {way.trouble}" if way.trouble else "by multicast"
        return f"{len(way.code.placement.owners)} blocks, each computed by {self.redundancy} workers; packets are sent {how}"

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        self._way(comm, replica.params.size, replica.params.dtype).gather()

    def figures(self, comm: Comm, state: Any, replica: Replica) -> dict[str, Any]:
        return {"clipped_fraction": self._way(comm, replica.params.size, replica.params.dtype).clipped_fraction}

    def _way(self, comm: Comm, size: int, dtype: np.dtype) -> Way:
        """Created once, collectively; freed with ``comm``."""
        found: Way = comm.kept((self, size, dtype), lambda: Way(comm, self, size, dtype))
        return found


class Way:
    """The code, the exchange and the memory of one run; freed with its communicator.

    clipped_fraction : part of the elements of all ranks' gradients that were clipped; see `gather`.
    trouble : why multicast does not work here, or "".
    """

    def __init__(self, comm: Comm, strategy: Coded, size: int, dtype: np.dtype):
        self.freed, self._comm, self._round, self._clipped, self._quantised, self.clipped_fraction = False, comm, 0, 0.0, 0, 0.0
        self._clip, self._exact = strategy.clip, bool(strategy.xor)
        self.code = SubsetCode(comm.size, strategy.redundancy, self._exact)
        self._own = self.code.placement.blocks[comm.rank]
        kind = dtype if self._exact else np.dtype(np.int32)
        self._kept = [aligned_zeros(size, kind) for _ in self._own]
        self._total, self._result = aligned_zeros(size, dtype if self._exact else np.int64), aligned_zeros(size, dtype)
        words = as_words(self._kept[0]).size
        self._exchange = SubsetExchange(comm, self.code, words, bool(strategy.turns), strategy.interface)
        self.trouble = self._exchange.trouble

    def keep(self, number: int, gradient: np.ndarray, rows: int) -> None:
        """The gradient of one of this rank's blocks, in a step of so many rows."""
        if self._exact:
            self._kept[number][:] = gradient
        else:
            self._clipped += quantise(gradient, self._kept[number], self._bound(rows))
            self._quantised += 1

    def _bound(self, rows: int) -> float:
        """On a sum over the rows of a block; ``clip`` is that on their mean."""
        return self._clip * max(ceil_div(rows, len(self.code.placement.owners)), 1)

    def sum(self, rows: int) -> np.ndarray:
        """Of the gradients of all blocks, in the order of the blocks."""
        self._compare()
        decoder = self._exchange({block: as_words(kept) for block, kept in zip(self._own, self._kept, strict=True)})
        self._total[:] = 0
        for number in range(len(self.code.placement.owners)):
            words = decoder.block(number)
            if self._exact:
                self._total += words.view(self._total.dtype)
            else:
                add_quantised(self._total, words.view(np.int32))
        if self._exact:
            return self._total
        dequantise(self._total, self._result, self._bound(rows))
        return self._result

    def _compare(self) -> None:
        """The copies of each block, in some rounds; collective."""
        numbers = {block: checksum(kept, self._round) for block, kept in zip(self._own, self._kept, strict=True)}
        self._round += 1
        if not any(numbers.values()):
            return
        known: dict[int, tuple[int, int]] = {}
        for rank, theirs in enumerate(self._comm.setup_allgather(numbers)):
            for block, found in theirs.items():
                first, its = known.setdefault(block, (rank, found))
                check_same(rank, found, first, its)

    def gather(self) -> None:
        """Fill `clipped_fraction`. Collective."""
        found = self._comm.setup_allgather((self._clipped, self._quantised))
        self.clipped_fraction = sum(clipped for clipped, _ in found) / max(sum(count for _, count in found), 1)

    def Free(self) -> None:
        """Collective."""
        self.freed = True
        self._exchange.Free()
