"""All-reduce by messages of arrays of which several ranks hold copies: fewer bytes than a ring of all ranks.

The n ranks stand in G groups. The members of a group bring the same array, bit for bit, which is cut into r slices. The ranks
that hold slice m, one of each group, all-reduce it round a ring of their own. Then slices go round a ring of all ranks, in
which the r ranks in a row hold the r slices: each rank sends to the next one and receives from the one before, r - 1 times. Two
ranks that exchanged slices with each other would get half the rate over TCP.

Cost, V = size of an array: V (1 + 1/r - 2/n) sent by each rank, in 2 (n/r - 1) + r - 1 rounds; a ring of all ranks sends
2 V (n - 1)/n. If r does not divide n, some groups have a member more, to which another one sends V.
Source: ours; the ring as `mpiddl.collectives.allreduce_ring`. No rank may be late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mpiddl.collectives.allreduce_ring import allreduce_ring
from mpiddl.collectives.copies import check_same, checked, checksum
from mpiddl.collectives.wire import LARGEST, Wire
from mpiddl.layout import block_bounds, pieces
from mpiddl.memory import aligned_zeros
from mpiddl.progress.started import Queue, Steps, run
from mpiddl.transport.base import SUM
from mpiddl.transport.comm import Comm


class ReplicatedRing(Queue):
    """The all-reduce of one communicator, for arrays of one size.

    Parameters
    ----------
    comm : Comm
    owners : sequence of sequence of int
        The ranks of each group; each rank is in one group.
    size, dtype :
        Of the arrays.

    Attributes
    ----------
    result : ndarray, shape (size,)
        The sum, the same bits on every rank, valid until the next call; in the memory that was given for it, if any was.
    late : Counter
        Ranks that were not waited for: none.

    Communication
    -------------
    Making it is collective.
    """

    def __init__(self, comm: Comm, owners: Sequence[Sequence[int]], size: int, dtype: np.dtype,
                 result: np.ndarray | None = None):
        self._comm, self.late, self._round = comm, Counter[int](), 0
        self._group = next(number for number, members in enumerate(owners) if comm.rank in members)
        self._place, self._groups = owners[self._group].index(comm.rank), len(owners)
        self._slices = min(map(len, owners))
        self._parts = [slice(*block_bounds(size, self._slices, place)) for place in range(self._slices)]
        self._owners, self._members = owners, list(owners[self._group])
        self.result = aligned_zeros(size, dtype) if result is None else result
        self._holds = self._place < self._slices
        across = [members[self._place] for members in owners if self._place < len(members)] if self._holds else [comm.rank]
        self._across = Wire(comm.Create(across))
        self._all = Wire(comm.Create(range(comm.size)))
        self._ring = [members[place] for members in owners for place in range(self._slices)]

    def begun(self, seconds: float) -> bool:
        """Whether this rank need not bring its array: never."""
        return False

    def __call__(self, array: np.ndarray | None) -> np.ndarray:
        """The sum of the arrays of all groups."""
        array = checked(array, self.result)
        self._compare(array)
        run(self._comm, (self._across.comm, self._all.comm), self._steps(array), True, self)
        return self.result

    def _compare(self, array: np.ndarray) -> None:
        """The copies of each group, in some rounds; collective."""
        number, self._round = checksum(array, self._round), self._round + 1
        if number:
            numbers = self._comm.setup_allgather(number)
            for first, *mates in self._owners:  # of all groups: so all ranks raise
                for mate in mates:
                    check_same(first, numbers[first], mate, numbers[mate])

    def _steps(self, array: np.ndarray) -> Steps:
        tag = self._all.tag()
        if self._groups == 1:
            self.result[:] = array
            return
        if self._holds:
            part = self._parts[self._place]
            yield from allreduce_ring(self._across, array[part], self.result[part], SUM)
            yield from self._gather(tag)
        yield from self._hand_on(tag)

    def _gather(self, tag: int) -> Steps:
        """Slices go round the ring of those that hold one, until each has all."""
        comm, place = self._all.comm, self._ring.index(self._comm.rank)
        right, left = self._ring[(place + 1) % len(self._ring)], self._ring[place - 1]
        for turn in range(self._slices - 1):
            ours, theirs = (self._segments((self._place - back) % self._slices) for back in (turn, turn + 1))
            coming = [comm.Irecv(self.result[part], left, tag) for part in theirs]
            leaving = [comm.Isend(self.result[part], right, tag) for part in ours]
            yield from coming
            yield from leaving

    def _hand_on(self, tag: int) -> Steps:
        """A member that holds no slice gets all of them from another one of its group."""
        comm, whole = self._all.comm, pieces(self.result.size, LARGEST)
        if not self._holds:
            yield from [comm.Irecv(self.result[part], self._members[self._place - self._slices], tag) for part in whole]
        elif self._place + self._slices < len(self._members):
            yield from [comm.Isend(self.result[part], self._members[self._place + self._slices], tag) for part in whole]

    def _segments(self, number: int) -> list[slice]:
        begin, end = self._parts[number].start, self._parts[number].stop
        most = max(1, self._all.segment_bytes // self.result.itemsize)
        return [slice(begin + part.start, begin + part.stop) for part in pieces(end - begin, most)]

    def Free(self) -> None:
        """Collective."""
        self._across.comm.Free()
        self._all.comm.Free()
