"""Tree all-reduce: every element is added up in one binary tree over the ranks, wherever these are.

The tree over P ranks splits at the largest power of two below P, and so do its branches: four ranks give (0 + 1) + (2 + 3).
If each rank's part is itself the sum of an aligned power of two of smaller parts, made in the same tree, the bits of the
result do not depend on how many of them a rank holds; that is what `mpiddl.strategies.Tree` is for.

The array is cut into a slice for each rank. In round t rank r sends its part of slice r + t to rank r + t and receives its
own slice's from rank r - t, so that links carry both ways at once; what came is added up in the order of the tree, and
complete slices go round the ring. Where each node holds a whole branch of the tree, of equal size but for the last, its
ranks add up their parts where they lie, in shared memory, and only ranks of equal local rank exchange, as in
`allreduce_two_step`. Both ways give the same bits.

Cost a rank: 2 (P-1)/P V sent, as by the ring, in P - 1 rounds and P - 1 more; scratch memory of two segments a rank. By
branches 2 (N-1)/N V a node, N nodes; on one node no messages, q V read and V written by all q ranks together.
Sources: reduce-scatter by pairwise exchange as in Thakur, Rabenseifner & Gropp 2005, doi:10.1177/1094342005051521; the ring
of Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002. The other way, sums that have the same bits in any order, costs more
operations: Demmel & Nguyen 2015, Parallel reproducible summation, doi:10.1109/TC.2014.2345391.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpiddl.collectives.allgather_ring import allgather_ring
from mpiddl.collectives.plan import STAGED_BYTES, Plan, staged_size
from mpiddl.collectives.ring import Own
from mpiddl.collectives.wire import LARGEST, Wire
from mpiddl.layout import block_bounds, ceil_div, pieces
from mpiddl.memory import aligned_zeros
from mpiddl.node.topology import Topology, neighbours
from mpiddl.progress.started import Steps
from mpiddl.transport.base import COMBINE, SUM, Op
from mpiddl.transport.comm import Comm

BLOCK_BYTES = 64 * 1024
"""Parts in shared memory are added up by blocks of this size, whose partial sums stay in the second cache."""

AHEAD = 2
"""Sends under way at a time: one on the links, one that follows it."""


def branches(topology: Topology) -> bool:
    """Whether each node holds a branch of the tree: so many ranks in a row, a power of two; the last node may have fewer.

    Examples
    --------
    >>> [branches(Topology(homes)) for homes in ([0, 0, 2, 2, 4], [0, 1, 0, 1], [0, 0, 0, 3, 3, 3], [0, 1, 1])]
    [True, False, False, False]
    """
    each = len(topology.nodes[0])
    in_a_row = all(node == tuple(range(each * k, each * k + len(node))) for k, node in enumerate(topology.nodes))
    alike = all(len(node) == each for node in topology.nodes[:-1]) and len(topology.nodes[-1]) <= each
    return in_a_row and alike and (each & (each - 1) == 0 or len(topology.nodes) == 1)


def levels(size: int) -> int:
    """Levels of the tree over ``size`` parts: so many partial sums wait at most."""
    return (size - 1).bit_length()


def add_up(op: Op, parts: Sequence[np.ndarray], out: np.ndarray, spare: np.ndarray) -> np.ndarray:
    """The ``parts`` combined in the order of the tree: ``out``, or of a single part itself.

    ``out`` may be the first part and none of the others. ``spare``, shape (`levels`, n), takes partial sums.
    """
    if len(parts) == 1:
        return parts[0]
    half = 1 << levels(len(parts)) - 1
    left = add_up(op, parts[:half], out, spare)
    right = add_up(op, parts[half:], spare[0], spare[1:])
    return COMBINE[op](left, right, out=out)


def exchange(wire: Wire, own: Own, result: np.ndarray, op: Op, *, segment_bytes: int | None = None) -> Steps:
    """``result`` becomes the reduction of the contributions ``own(begin, end)``, which may lie in ``result``.

    Each element of them is asked for once.
    """
    comm, tag, n = wire.comm, wire.tag(), result.size
    size, rank = comm.size, comm.rank
    if not n:
        return
    longest = ceil_div(n, size)
    count = ceil_div(longest, max(1, min((segment_bytes or wire.segment_bytes) // result.itemsize, LARGEST)))
    slot = ceil_div(longest, count)

    def part(which: int, segment: int) -> tuple[int, int]:
        begin, end = block_bounds(n, size, which)
        first, last = block_bounds(end - begin, count, segment)
        return begin + first, begin + last

    with wire.scratch((2 * size + levels(size)) * slot, result.dtype) as scratch:
        slots = scratch.reshape(-1, slot)
        coming, leaving = {}, deque[Any]()

        def receive(segment: int) -> None:
            begin, end = part(rank, segment)
            for source in ((rank - turn) % size for turn in range(1, size) if begin < end):
                into = slots[segment % 2 * size + source, : end - begin]
                coming[segment, source] = comm.Irecv(into, source, tag)

        for segment in range(count):
            if segment == 0:
                receive(0)
            if segment + 1 < count:
                receive(segment + 1)
            begin, end = part(rank, segment)
            for turn in range(1, size):
                target = (rank + turn) % size
                first, last = part(target, segment)
                if first < last:
                    leaving.append(comm.Isend(own(first, last), target, tag))
                if begin < end:
                    yield coming.pop((segment, (rank - turn) % size))
                if len(leaving) >= AHEAD:
                    yield leaving.popleft()
            if begin < end:
                came = slots[segment % 2 * size :, : end - begin]
                came[rank] = own(begin, end)
                add_up(op, list(came[:size]), came[0], slots[2 * size :, : end - begin])
                result[begin:end] = came[0]
        yield from leaving
    yield from allgather_ring(wire, None, result, tag=tag, segment_bytes=segment_bytes)


class TreeSum(Plan):
    """A tree all-reduce that is set up once: fill ``input``, call it, read ``result``, as `TwoStep`.

    Parameters
    ----------
    comm : Comm
        All ranks that take part.
    size : int
        Elements.
    dtype : dtype
        Of input and result.
    op : Op
        SUM, MIN, MAX or PROD.

    Attributes
    ----------
    input : ndarray, shape (size,)
        This rank's contribution. Free to be written as soon as the call is over.
    result : ndarray, shape (size,)
        The reduction, not to be written, valid until this rank makes the next call; one array for the whole node where nodes
        hold branches of the tree.

    Raises
    ------
    ShapeError, UsageError
        On every rank: a size, dtype or op that cannot be taken; the message names the ranks that gave it.
    MismatchError
        On every rank: ranks gave different sizes, dtypes or ops.
    CommError
        On every rank: ``comm`` was freed, or a node has not enough room for shared memory.

    Communication
    -------------
    Making it is collective: two all-gathers, the shared memory, a split, at the first time on ``comm`` its neighbours. A call
    sends what the module says. Freed with ``comm``, or by ``Free``.
    """

    def __init__(self, comm: Comm, size: int, dtype: DTypeLike, op: Op = SUM):
        super().__init__(comm, size, dtype, op)
        kind, near = self._kind, self._near
        self._together = branches(near.topology) and len(near.topology.nodes) < comm.size
        with self._made():
            self.input, self._result = self._memory(size, kind)
        self._inputs = self._arena.peers("input") if self._together else [self.input]
        self._local = near.local.rank if self._together else 0
        nodes = len(near.topology.nodes) if self._together else comm.size
        self._streams = 1 if not self._together else near.topology.least if nodes > 1 else near.local.size
        across = near.across if self._together else comm
        self._wire = Wire(across.Create(range(across.size))) if nodes > 1 else None
        self._block = BLOCK_BYTES // kind.itemsize
        self._spare = aligned_zeros(levels(len(self._inputs)) * self._block, kind).reshape(-1, self._block)

    def steps(self, size: int) -> Steps:
        """Reduce the first ``size`` elements."""
        if self._together:
            yield self._arena.meet("input")  # all inputs are there, and nobody reads the last result any more
        if self._local < self._streams:
            begin, end = block_bounds(size, self._streams, self._local)
            if self._wire is not None:
                result = self._result[begin:end]
                yield from exchange(self._wire, lambda first, last: self._node(begin + first, begin + last), result, self._op)
            elif self._together:
                self._node(begin, end)
            else:
                self._result[begin:end] = self.input[begin:end]
        if self._together:
            yield self._arena.meet("input")

    def _memory(self, size: int, kind: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        if self._together:
            return self._arena.shared("input", size, kind), self._arena.common("result", size, kind)
        return self._arena.private("input", size, kind), self._arena.private("result", size, kind)

    def _node(self, begin: int, end: int) -> np.ndarray:
        """The node's inputs combined: in its result, or a single rank's input where it is."""
        if len(self._inputs) == 1:
            return self._inputs[0][begin:end]
        for block in pieces(end - begin, self._block):
            part = slice(begin + block.start, begin + block.stop)
            spare = self._spare[:, : part.stop - part.start]
            add_up(self._op, [array[part] for array in self._inputs], self._result[part], spare)
        return self._result[begin:end]


def kept_plan(comm: Comm, nbytes: int, dtype: np.dtype, op: Op, *, most_bytes: int = STAGED_BYTES) -> TreeSum | None:
    """A `TreeSum` for arrays that lie anywhere, kept with ``comm``; None where no memory is shared. Collective at first."""
    topology = neighbours(comm).topology
    if not branches(topology) or len(topology.nodes) == comm.size:
        return None
    size = staged_size(nbytes, dtype, most_bytes)
    found: TreeSum = comm.kept(("tree", size, dtype, op), lambda: TreeSum(comm, size, dtype, op))
    return found
