"""Replicate-and-slice: the members of a group compute the same gradient, and each sends another slice of it.

Source: ours; see `mpiddl.collectives.allreduce_replicated_multicast` and `mpiddl.collectives.allreduce_replicated_ring`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiddl.coding.placements import replicated_groups
from mpiddl.collectives.allreduce_replicated_multicast import ReplicatedMulticast
from mpiddl.collectives.allreduce_replicated_ring import ReplicatedRing
from mpiddl.strategies.coded.exchange import Way, slots
from mpiddl.transport.comm import Comm


class ReplicateAndSlice(Way):
    """By multicast where it works and is wanted, else in rings; all ranks the same."""

    def __init__(self, comm: Comm, members: Sequence[Sequence[int]], redundancy: int, size: int, dtype: np.dtype,
                 transport: str, ahead: int, interface: str):
        super().__init__(comm, members, size, dtype)
        self._groups = replicated_groups(len(members), redundancy).owners
        self._skipped, self._began, self._usual_s = False, 0.0, 0.0
        if len(members) > 1:
            self._connect(size, dtype, transport, ahead, interface)
        self.team.count(anew=True)

    def _connect(self, size: int, dtype: np.dtype, transport: str, ahead: int, interface: str) -> None:
        rounds = slots(ahead, size * dtype.itemsize * len(self._groups))
        result = None if self.team.input is None else self.team.result
        why = ""
        if transport != "unicast":
            why = self._try_multicast(lambda leaders: ReplicatedMulticast(
                leaders, self._groups, size, dtype, rounds, interface, result), transport == "multicast")
        if transport == "unicast" or why:
            self.note = self._about("in rings") + (f"; {why}" if why else "")
            if (leaders := self.team.leaders) is not None:
                self._exchange = ReplicatedRing(leaders, self._groups, size, dtype, result)
        else:
            self.note = self._about("by multicast")

    def _about(self, way: str) -> str:
        sizes, count = sorted({len(workers) for workers in self._groups}), len(self._groups)
        if sizes == [1]:
            return ("the workers add up their gradients in a ring" if way == "in rings" else
                    f"each worker sends its gradient to all others {way}")
        if count == 1:
            return "replicate-and-slice: all workers compute the whole gradient, and none is sent"
        each = " or ".join(map(str, sizes))
        return (f"replicate-and-slice: {count} groups of {each} workers that compute the same gradient; each sends a slice of "
                f"it {way}")

    def needs_gradient(self) -> bool:
        usual = self._usual_s
        self._skipped = self.team.decide(lambda: self._exchange is not None and self._exchange.begun(usual))
        self._left_out += self._skipped
        self._began = self._comm.now()
        return not self._skipped

    def keep(self, number: int, gradient: np.ndarray) -> None:
        """Nothing: a worker has one block, which `sum` gets."""

    def sum(self, gradient: np.ndarray) -> np.ndarray:
        """The sum of the gradients of all groups."""
        if not self._skipped:
            self._usual_s = self._comm.now() - self._began
        whole = gradient if self._skipped else self.team.sum(gradient)
        return self._shared(whole if self._exchange is None else self._exchange(None if self._skipped else whole))
