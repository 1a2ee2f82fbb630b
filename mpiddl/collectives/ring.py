"""The ring: every rank sends to its right neighbour and receives from its left one.

The array is cut into P chunks. In round t rank r sends chunk r - t - 1 and receives chunk r - t - 2 (modulo P). In the
first P - 1 rounds what is received is added to, so that chunk r is complete on rank r in the end (reduce-scatter); in P
- 1 more the complete chunks go round (all-gather). Chunks are cut into segments, and a segment travels on as soon as it
is there: a rank does not wait for the end of a round, only the first segment's way round the ring is not overlapped.

Cost a rank: (P-1)/P V sent for each half, in P - 1 rounds; scratch memory of one chunk.
Source: Patarasuk & Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations,
doi:10.1016/j.jpdc.2008.09.002. Ours: segments that run ahead of rounds, and contributions made when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpiddl.collectives.wire import LARGEST, Wire
from mpiddl.layout import block_bounds, ceil_div
from mpiddl.progress.started import Steps
from mpiddl.transport.base import Request

Part = tuple[int, int]

Own = Callable[[int, int], np.ndarray]
"""A rank's contribution to elements ``begin`` to ``end``."""


class Ring:
    """The rounds of one collective over a ring of ``n`` elements.

    Parameters
    ----------
    wire : Wire
        Its ranks, in the order of the ring.
    n : int
        Elements.
    itemsize : int
        Bytes of one.
    segment_bytes : int, optional
        Size of a segment; by default the wire's.
    order : sequence of int, optional
        Which block of the array each rank's chunk is; by default in the order of the ring.
    """

    def __init__(self, wire: Wire, n: int, itemsize: int, segment_bytes: int | None = None,
                 order: Sequence[int] | None = None):
        self.comm, self.n, self.order = wire.comm, n, order or range(wire.comm.size)
        most = min(max(1, (segment_bytes or wire.segment_bytes) // itemsize), LARGEST)
        self.segments = max(1, ceil_div(ceil_div(n, wire.comm.size), most))

    @property
    def half(self) -> int:
        """Rounds of a reduce-scatter, or of an all-gather."""
        return self.comm.size - 1

    @property
    def slot(self) -> int:
        """Elements of the longest segment."""
        return ceil_div(ceil_div(self.n, self.comm.size), self.segments)

    def part(self, chunk: int, segment: int) -> Part:
        """Begin and end of a segment of a chunk; empty where the chunk is shorter than others."""
        begin, end = block_bounds(self.n, self.comm.size, self.order[chunk % self.comm.size])
        first, last = block_bounds(end - begin, self.segments, segment)
        return begin + first, begin + last

    def rounds(self, tag: int, first: int, last: int, here: Callable[[Part], np.ndarray],
               into: Callable[[int, int, Part], np.ndarray], arrived: Callable[[int, int, Part], np.ndarray],
               held: int | None = None) -> Steps:
        """Rounds ``first`` to ``last - 1``.

        Parameters
        ----------
        tag : int
            Of all messages.
        here : callable
            ``here(part)`` is what the first round sends.
        into : callable
            ``into(round, segment, part)`` is where a segment is received.
        arrived : callable
            ``arrived(round, segment, part)`` is called when it is there; returns what to send on.
        held : int
            So many rounds later the memory of what was sent is written again; by default almost a whole way round.
        """
        rank, right, left = self.comm.rank, (self.comm.rank + 1) % self.comm.size, (self.comm.rank - 1) % self.comm.size
        coming: dict[int, Request] = {}
        leaving: dict[tuple[int, int], Request] = {}

        def receive(turn: int, segment: int) -> Steps:
            """Post a receive; the send whose memory this round writes must be over."""
            earlier = leaving.pop((turn - (held or self.comm.size - 1), segment), None)
            if earlier is not None:
                yield earlier
            begin, end = self.part(rank - turn - 2, segment)
            if begin < end:
                coming[segment] = self.comm.Irecv(into(turn, segment, (begin, end)), left, tag)

        def send(turn: int, segment: int, array: np.ndarray) -> None:
            if array.size:
                leaving[turn, segment] = self.comm.Isend(array, right, tag)

        for segment in range(self.segments):
            yield from receive(first, segment)
        for segment in range(self.segments):
            send(first, segment, here(self.part(rank - first - 1, segment)))
        for turn in range(first, last):
            for segment in range(self.segments):
                part = self.part(rank - turn - 2, segment)
                if part[0] == part[1]:
                    array = np.empty(0)
                else:
                    yield coming.pop(segment)
                    array = arrived(turn, segment, part)
                if turn + 1 < last:
                    send(turn + 1, segment, array)
                    yield from receive(turn + 1, segment)
        yield from leaving.values()
