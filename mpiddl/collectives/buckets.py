"""The sum over all ranks of one array that is made part by part: a bucket's all-reduce starts when it is complete.

Where each rank is on a node of its own, a bucket goes round the ring of all ranks, in place. Where nodes have several,
it takes two steps: through shared memory in the nodes, by rings across them; nothing is copied.

Cost a rank: as `allreduce_ring` and `allreduce_two_step`, 2 (N-1)/N V sent by a node; a bucket costs one latency of 2
(N-1) segments, in which the wire works for the bucket before it.
Source: Li et al. 2020, doi:10.14778/3415478.3415530, section 3.2 (buckets in the order of the backward pass).
"""

from __future__ import annotations

import time

import numpy as np

from mpiddl.collectives.allreduce_ring import allreduce_ring
from mpiddl.collectives.allreduce_two_step import TwoStep
from mpiddl.collectives.wire import MPI, new_wire
from mpiddl.memory import PRIVATE, aligned_zeros
from mpiddl.node.topology import neighbours
from mpiddl.progress.started import Started, go_on
from mpiddl.transport.base import SUM
from mpiddl.transport.comm import Comm

PAUSE_S = 0.00002
"""Between two looks while a rank waits: others, and the kernel's own work on packets, may need its core."""


class Buckets:
    """An array and its sum; set up once, then for each sum: `start` every part, in the same order on every rank; `wait`.

    Parameters
    ----------
    comm : Comm
        All ranks that take part.
    size : int
        Elements.
    dtype : dtype
        Of the array and the sum.
    segment_bytes : int, optional
        Size of a pipelined message; by default as the MPI library likes it (`wire.SEGMENT_BYTES`).
    transport : str
        What carries messages between nodes: mpi, or verbs where they work.

    Attributes
    ----------
    input : ndarray, shape (size,)
        This rank's contribution. What was started must not be written before `wait` is over.
    result : ndarray, shape (size,)
        The sum: valid from `wait` to the next `start`. It may be ``input``, or memory of the node that is not to be written.

    Communication
    -------------
    Making it is collective, as of `TwoStep`.
    """

    def __init__(self, comm: Comm, size: int, dtype: np.dtype, segment_bytes: int | None = None, transport: str = MPI):
        self._comm, self._segment_bytes = comm, segment_bytes
        self._plan: TwoStep | None = None
        self.started: list[Started] = []
        near = neighbours(comm)
        if len(near.topology.nodes) == comm.size:
            comm.patient_barrier(0.0)
            self._wire = new_wire(near.ring, transport)
            self.input = self.result = aligned_zeros(size, dtype)
        else:
            self._plan = TwoStep(comm, size, dtype, segment_bytes=segment_bytes, transport=transport)
            self.input, self.result = self._plan.input, self._plan.result
        self.freed = False

    @property
    def placed(self) -> str:
        """In words, where ``input`` lies."""
        return self._plan.placed if self._plan is not None else PRIVATE

    def start(self, begin: int, end: int) -> Started:
        """Elements ``begin`` to ``end`` of ``input`` are final: start their all-reduce; returns it."""
        if self._plan is not None:
            request = self._plan.start_part(begin, end)
        else:
            part, tag = self.input[begin:end], self._wire.tag()
            steps = allreduce_ring(self._wire, part, part, SUM, tag=tag, segment_bytes=self._segment_bytes)
            request = Started(self._comm, (self._wire.comm,), steps)
        self.started.append(request)
        return request

    def wait(self) -> None:
        """Until ``result`` is whole, on this rank and, where it is shared, on its node."""
        started, self.started = self.started, []
        entered = self._comm.now()
        while not all(request.over for request in started):
            go_on(self._comm, list(self._comm.started))
            time.sleep(PAUSE_S)
        self._comm.meter.synchronised(entered, entered, self._comm.now())  # once for all, which are under way together
        for request in started:
            request.Wait()  # raises what went wrong
        if self._plan is not None:
            self._plan.meet().Wait()

    def Free(self) -> None:
        """Give the memory back; collective. The arrays must not be touched afterwards."""
        self.freed = True
        for request in self.started:
            request.give_up("its Buckets was freed")
        if self._plan is not None:
            self._plan.Free()
        else:
            self._wire.comm.Free()
