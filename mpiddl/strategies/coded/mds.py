"""MDS slice code: each worker computes r blocks, and sends one coded vector of V/m.

Source: see `mpiddl.collectives.allreduce_mds_multicast` and `mpiddl.collectives.allreduce_mds_ring`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiddl.coding.mds_code import MdsCode
from mpiddl.coding.placements import cyclic
from mpiddl.collectives.allreduce_mds_multicast import MdsMulticast
from mpiddl.collectives.allreduce_mds_ring import MdsRing
from mpiddl.strategies.coded.exchange import Way, slots
from mpiddl.transport.comm import Comm


class Mds(Way):
    """By multicast where it works and is wanted, else in a ring; all ranks the same.

    By multicast, ``stragglers`` workers may be late.
    """

    def __init__(self, comm: Comm, members: Sequence[Sequence[int]], redundancy: int, stragglers: int, size: int,
                 dtype: np.dtype, transport: str, ahead: int, interface: str):
        super().__init__(comm, members, size, dtype)
        self._blocks, self._done = redundancy, 0
        result, why = None if self.team.input is None else self.team.result, ""
        if transport != "unicast":
            code = MdsCode(cyclic(len(members), redundancy), redundancy - stragglers)
            rounds = slots(ahead, len(members) * code.slice_size(size) * dtype.itemsize)
            why = self._try_multicast(lambda leaders: MdsMulticast(leaders, code, size, dtype, rounds, interface, result),
                                      transport == "multicast")
        waits = f"can finish without {stragglers} of the workers" if stragglers else "waits for all workers"
        way = f"by multicast; a step {waits}"
        if transport == "unicast" or why:
            code = MdsCode(cyclic(len(members), redundancy), redundancy)
            way = "in a ring; a step waits for all workers" + (f"; {why}" if why else "")
            if (leaders := self.team.leaders) is not None:
                self._exchange = MdsRing(leaders, code, size, dtype, result)
        self.note = (f"MDS code: each worker computes {redundancy} of {len(members)} blocks, and sends one vector "
                     f"{f'of 1/{code.slices} of a gradient' if code.slices > 1 else 'as long as a gradient'} {way}")
        self.team.count(anew=True)

    def needs_gradient(self) -> bool:
        needed = not self.team.decide(lambda: not self._exchange.needs())
        if not needed:
            self._left_out += self._blocks - self._done
        return needed

    def keep(self, number: int, gradient: np.ndarray) -> None:
        whole = self.team.sum(gradient)
        if self._exchange is not None:
            self._exchange.bring(number, whole)
        self._done = number + 1

    def sum(self, gradient: np.ndarray) -> np.ndarray:
        self._done = 0
        return self._shared(gradient if self._exchange is None else self._exchange())
