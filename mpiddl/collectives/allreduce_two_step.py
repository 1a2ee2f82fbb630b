"""Two-step reduction: inside the nodes through shared memory, across nodes by messages. Nothing is copied.

Every rank of a node has its input, and the node has one result, in memory that all of them see. The array is cut into
one slice for each of the m local ranks that every node has. Rank j adds up slice j of its neighbours' inputs, straight
into the result, all-reduces it with the ranks j of other nodes in a ring, and a barrier ends the call. A segment is
added up when the ring first needs it, so that memory and network work at the same time.

`leader=True` is the other reading: all ranks of a node add up a part each, and its leader alone talks to other leaders.

Cost, N nodes: 2 (N-1)/N V sent by a node, the least there is, by its m ranks in parallel (leader form: by one), in 2
(N-1) rounds; in the node q V read and V written. Shared memory q V + V a node, scratch of V/(m N) a rank. The bytes are
those of a flat ring of one rank a node; what is gained is rounds, streams in parallel, and the copies that messages
inside a node are made of.
Sources: slices as the 2D torus of Mikami et al. 2018, arXiv:1811.05233; leaders as the hierarchical all-reduce of Jia
et al. 2018, arXiv:1807.11205 [I: in both the steps inside a node go through shared memory instead of messages].
Same bits on every rank: each element is added up on one path.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpiddl import kernels
from mpiddl.collectives.allreduce_ring import reduce_round
from mpiddl.collectives.arguments import check_whole, fused
from mpiddl.collectives.plan import STAGED_BYTES, Plan, staged_size
from mpiddl.collectives.wire import MPI, check_transport, new_wire
from mpiddl.errors import UsageError
from mpiddl.layout import block_bounds, ceil_div, pieces
from mpiddl.machine.clock import now
from mpiddl.memory import ALIGNMENT
from mpiddl.progress.started import Started, Steps, run
from mpiddl.transport.base import COMBINE, SUM, Op
from mpiddl.transport.comm import Comm
from mpiddl.transport.shared_memory import KernelRequest, run_kernel

CACHED_BYTES = 64 * 1024
"""Adding up more than two inputs goes by blocks of this size, which stay in the first or second cache."""

STREAMED_BYTES = 8 << 20
"""From here on a node's result is written past the caches, which would not hold it beside the inputs."""


class TwoStep(Plan):
    """An all-reduce that is set up once: fill ``input``, call it, read ``result``.

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
    leader : bool
        Only one rank of each node talks to other nodes.
    segment_bytes : int, optional
        Size of a pipelined message; by default as the MPI library likes it (`wire.SEGMENT_BYTES`).
    transport : str
        What carries messages between nodes: mpi, or verbs where they work.

    Attributes
    ----------
    input : ndarray, shape (size,)
        This rank's contribution. Free to be written as soon as the call is over.
    result : ndarray, shape (size,)
        The reduction: one array for the whole node, not to be written, valid until this rank makes the next call.

    Raises
    ------
    ShapeError, UsageError
        On every rank: a size, dtype, op or length of segments that cannot be taken; the message names the ranks that gave it.
    MismatchError
        On every rank: ranks gave different sizes, dtypes or ops.
    CommError
        On every rank: ``comm`` was freed, or a node has not enough room for shared memory.

    Communication
    -------------
    Making it is collective: two all-gathers, the shared memory, a split across nodes, at the first time on ``comm`` its
    neighbours. A call sends what the module says. Freed with ``comm``, or by ``Free``.
    """

    def __init__(self, comm: Comm, size: int, dtype: DTypeLike, op: Op = SUM, *, leader: bool = False,
                 segment_bytes: int | None = None, transport: str = MPI):
        self._leader, self._segment_bytes, self._transport = leader, segment_bytes, transport
        super().__init__(comm, size, dtype, op)
        kind, near, self._beside = self._kind, self._near, comm.started
        local, nodes = near.local, len(near.topology.nodes)
        with self._made():
            self.input = self._arena.shared("input", size, kind)
            self._result = self._arena.common("result", size, kind)
            self._barrier = self._arena.barrier("input")
            at_once = nodes == 1 < local.size and fused(kind, op) and self._barrier
            self._kernel: Any = kernels.node_sum.node_sum if at_once else None
        self._inputs = self._arena.peers("input")
        self._streams = (1 if leader else near.topology.least) if nodes > 1 else local.size
        self._wire = new_wire(near.across, transport) if nodes > 1 else None
        self._leader = leader and nodes > 1
        self._addresses = np.array([array.ctypes.data for array in self._inputs])
        self._at_once = self._node_sum(size) if at_once else ()

    def _checked(self, size: Any, dtype: Any, op: Op) -> np.dtype:
        kind = super()._checked(size, dtype, op)
        if self._segment_bytes is not None:
            check_whole("segment_bytes", self._segment_bytes, 1)
        if not isinstance(self._leader, bool):
            raise UsageError(f"leader: got {self._leader!r}, expected True or False")
        check_transport("transport", self._transport)
        return kind

    def _settings(self) -> dict[str, Any]:
        return {"leader": self._leader, "segment_bytes": self._segment_bytes, "transport": self._transport}

    def __call__(self) -> np.ndarray:
        """Reduce, and return ``result``."""
        self._check_alive()
        if self._at_once and not self._beside and self._comm.held is None:
            entered = now()
            run_kernel(self._comm, self._kernel, self._at_once, self._barrier[1], _barriers)
            self._comm.meter.synchronised(entered, entered, now())
        else:
            self.start(blocking=True)
        return self.result

    def _node_sum(self, size: int) -> tuple[Any, ...]:
        """What `mpiddl.kernels.node.node_sum` takes for ``size`` elements: one call does all there is to do on one node."""
        result = self._result
        line = ALIGNMENT // result.itemsize
        lines = block_bounds(ceil_div(size, line), len(self._inputs), self._near.local.rank)
        begin, end = (min(edge * line, size) for edge in lines)
        return result, self._addresses, begin, end, result.nbytes >= STREAMED_BYTES, *self._barrier

    def start(self, blocking: bool = False) -> Started:
        """The same without waiting: a request. ``input`` must not be written before it is complete."""
        self._check_alive()
        return run(self._comm, self.wires, self.steps(self.result.size), blocking, self)

    def start_part(self, begin: int, end: int) -> Started:
        """Reduce elements ``begin`` to ``end`` of ``input`` as soon as these are there, while others are still written.

        Parts are started in the same order on every rank and may be under way together; when all of them are over, `meet`
        ends the reduction, and `result` is whole.
        """
        self._check_alive()
        met = run(self._comm, (), self._meeting(), False, self) if self._near.local.size > 1 else None
        tag = self._wire.tag() if self._wire else 0
        return Started(self._comm, self.wires, self._part(met, begin, end, tag), self)

    def meet(self) -> Started:
        """The end of the parts: nobody of this node writes into `result` any more."""
        self._check_alive()
        return run(self._comm, (), self._meeting() if self._near.local.size > 1 else iter(()), False, self)

    def _meeting(self) -> Steps:
        yield self._arena.meet("input")

    def _part(self, met: Started | None, begin: int, end: int, tag: int) -> Steps:
        """The work on one part: of each stream a slice of it."""
        if met is not None:
            yield met
        if self._near.local.rank < self._streams:
            first, last = block_bounds(end - begin, self._streams, self._near.local.rank)
            yield from self._slice(begin + first, begin + last, tag)

    def Free(self) -> None:
        self._at_once = ()
        super().Free()

    def steps(self, size: int) -> Steps:
        """Reduce the first ``size`` elements."""
        if self._at_once:
            yield KernelRequest(self._comm, self._kernel, self._node_sum(size))
            return
        yield self._arena.meet("input")  # all inputs are there, and nobody reads the last result any more
        local = self._near.local
        if self._leader:
            self._add_up(*block_bounds(size, local.size, local.rank))
            yield self._arena.meet("input")
        if local.rank < self._streams:
            yield from self._slice(*block_bounds(size, self._streams, local.rank))
        yield self._arena.meet("input")

    def _slice(self, begin: int, end: int, tag: int | None = None) -> Steps:
        """All of the work on one slice of the result."""
        if self._wire is None:
            self._add_up(begin, end)
            return
        result = self._result[begin:end]

        def own(first: int, last: int) -> np.ndarray:
            if not self._leader:
                self._add_up(begin + first, begin + last)
            return result[first:last]

        yield from reduce_round(self._wire, own, result, self._op, tag, segment_bytes=self._segment_bytes)

    def _add_up(self, begin: int, end: int) -> None:
        """The node's inputs, in rank order, into its result."""
        combine, inputs, result = COMBINE[self._op], self._inputs, self._result
        if len(inputs) == 1:
            result[begin:end] = inputs[0][begin:end]
        elif len(inputs) == 2:
            combine(inputs[0][begin:end], inputs[1][begin:end], out=result[begin:end])
        else:
            for block in pieces(end - begin, CACHED_BYTES // result.itemsize):
                part = slice(begin + block.start, begin + block.stop)
                combine(inputs[0][part], inputs[1][part], out=result[part])
                for more in inputs[2:]:
                    combine(result[part], more[part], out=result[part])


def _barriers(size: int) -> int:
    """That a call of the kernel passes."""
    return 2


def staged(comm: Comm, nbytes: int, dtype: np.dtype, op: Op, *, leader: bool = False, transport: str = MPI,
           most_bytes: int = STAGED_BYTES) -> TwoStep:
    """A `TwoStep` for arrays that lie anywhere, kept with ``comm`` for the next call of about that size; collective."""
    size = staged_size(nbytes, dtype, most_bytes)
    found: TwoStep = comm.kept(("two-step", size, dtype, op, leader, transport),
                               lambda: TwoStep(comm, size, dtype, op, leader=leader, transport=transport))
    return found
