"""Collectives on one node that are one call of a kernel which meets the other ranks by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from mpiddl.machine.clock import now
from mpiddl.node.arena import Arena
from mpiddl.progress.started import Queue, Steps
from mpiddl.transport.comm import Comm
from mpiddl.transport.shared_memory import KernelRequest, end_kernel, run_kernel

PASSED = 0
"""Where a kernel's state holds the barriers that it has passed (`mpiddl.kernels.node.meet`)."""

Further = tuple[Callable[..., bool], tuple[Any, ...], int]
"""A kernel, what it takes but for its patience, and the barriers that it passes."""


class AtOnce(Queue, ABC):
    """What such collectives keep from call to call, for one communicator and dtype.

    Parameters
    ----------
    comm : Comm
        Ranks of one node.
    size, dtype :
        Of the memory that each rank shares with the others, for whatever the kernel wants it.

    Communication
    -------------
    Making it is collective: the shared memory, at the first time on ``comm`` its neighbours.
    """

    kernel: Callable[..., bool]

    def __init__(self, comm: Comm, size: int, dtype: Any):
        self._comm, self._arena = comm, Arena(comm)
        self.own = self._arena.shared("own", size, dtype)
        self.addresses = np.array([array.ctypes.data for array in self._arena.peers("own")])
        self.barrier = self._arena.barrier("own")
        self.alone = not self.barrier  # virtual ranks, which no kernel can meet

    @abstractmethod
    def allreduce(self, source: np.ndarray, result: np.ndarray) -> tuple[Any, ...]:
        """What the kernel takes, but for its patience, to make ``result`` the sum of all ranks' ``source``: contiguous, 1-D, of
        the right dtype, and maybe the same array."""

    @abstractmethod
    def barriers(self, size: int) -> int:
        """How many of them a call passes whose source has ``size`` elements."""

    def further(self, arguments: tuple[Any, ...]) -> Iterable[Further]:
        """What is still to be done after such a call of the kernel, on every rank."""
        return ()

    def run(self, arguments: tuple[Any, ...]) -> None:
        """The kernel in one go, where nothing else is under way."""
        entered = now()
        try:
            run_kernel(self._comm, self.kernel, arguments, self.barrier[1], self.barriers)
        finally:
            if not self._comm.broken:
                self._run_further(arguments)
        self._comm.meter.synchronised(entered, entered, now())

    def steps(self, arguments: tuple[Any, ...]) -> Steps:
        """The same beside others."""
        yield KernelRequest(self._comm, self.kernel, arguments)
        for kernel, others, _ in self.further(arguments):
            yield KernelRequest(self._comm, kernel, others)

    def _run_further(self, arguments: tuple[Any, ...]) -> None:
        for kernel, others, barriers in self.further(arguments):
            end_kernel(self._comm, kernel, others, partial(self._passed, self.barrier[1].item(PASSED) + barriers))

    def _passed(self, barriers: int) -> bool:
        return bool(self.barrier[1][PASSED] >= barriers)
