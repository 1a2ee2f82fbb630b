"""All-reduce by messages of the sum of blocks that several ranks have computed: an MDS code, with any placement of blocks.

All owners of a block take part: each rank makes one vector of V/r of its blocks (`mpiddl.coding.mds_code`). All vectors go to
all ranks round a ring, and each rank computes the sum of all blocks from them.

Cost, V = size of an array, n ranks: (n - 1) V/r sent by each rank. That is less than a ring all-reduce only for r > n/2.
Source: as `mpiddl.coding.mds_code`. No rank may be late.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from mpiddl.coding.mds_code import MdsCode, computing_order
from mpiddl.collectives.allgather_ring import allgather_ring
from mpiddl.collectives.copies import check_same, checked, checksum
from mpiddl.collectives.wire import Wire
from mpiddl.memory import aligned_zeros
from mpiddl.progress.started import Queue, run
from mpiddl.transport.comm import Comm


class MdsRing(Queue):
    """The all-reduce of one communicator, for arrays of one size.

    Parameters
    ----------
    comm : Comm
    code : MdsCode
        Of as many workers as ``comm`` has ranks. Its number of slices is the redundancy: all owners are waited for.
    size, dtype :
        Of the arrays.

    Attributes
    ----------
    own : list of int
        The blocks of this rank, in the order in which it brings them.
    result : ndarray, shape (size,)
        The sum, the same bits on every rank, valid until the next call; in the memory that was given for it, if any was.
    late : Counter
        Ranks that were not waited for: none.

    Communication
    -------------
    Making it is collective.
    """

    def __init__(self, comm: Comm, code: MdsCode, size: int, dtype: np.dtype, result: np.ndarray | None = None):
        self._comm, self._code, self._round, self.late = comm, code, 0, Counter[int]()
        self._chosen = code.choose()
        assert self._chosen is not None  # all blocks are finished
        self.own = computing_order(code.placement, comm.rank)
        self.result = aligned_zeros(size, dtype) if result is None else result
        length = code.slice_size(size)
        self._whole = aligned_zeros(length * comm.size, dtype)
        self._vectors = dict(enumerate(self._whole.reshape(comm.size, length)))
        self._wire, self._numbers = Wire(comm.Create(range(comm.size))), list[int]()

    def needs(self) -> bool:
        """Whether blocks of this rank are still of use: always."""
        return True

    def bring(self, number: int, array: np.ndarray) -> None:
        """Take the array of block ``own[number]``, in this order. Its memory is free afterwards."""
        vector, array = self._vectors[self._comm.rank], checked(array, self.result)
        if not number:
            vector[:] = 0
            self._numbers.clear()
        assert self._chosen is not None
        self._numbers.append(checksum(array, self._round))
        if self._comm.rank in self._chosen[self.own[number]]:
            self._code.add_block(self._comm.rank, self.own[number], array, self._chosen, vector)

    def __call__(self) -> np.ndarray:
        """The sum of all blocks, when all ranks have brought theirs."""
        assert self._chosen is not None
        if self._numbers[0]:
            self._compare()
        self._round += 1
        run(self._comm, (self._wire.comm,), allgather_ring(self._wire, None, self._whole), True, self)
        self._code.decode(self._vectors, self._chosen, self.result)
        return self.result

    def _compare(self) -> None:
        """The copies of each block; collective."""
        numbers: dict[int, tuple[int, int]] = {}
        for worker, theirs in enumerate(self._comm.setup_allgather(self._numbers)):
            for block, found in zip(computing_order(self._code.placement, worker), theirs, strict=True):
                first, known = numbers.setdefault(block, (worker, found))
                check_same(worker, found, first, known)

    def Free(self) -> None:
        """Collective."""
        self._wire.comm.Free()
