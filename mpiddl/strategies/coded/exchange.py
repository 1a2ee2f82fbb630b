"""What all ways to sum coded gradients have in common: the ranks of a worker, and what is counted.

A *way* is made once for each run. It is freed with its communicator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from mpiddl.errors import TransportError
from mpiddl.strategies.coded.team import Team
from mpiddl.transport.agree import agreed
from mpiddl.transport.comm import Comm

MEMORY_BYTES = 512 << 20
"""Most that steps under way take, unless there are fewer than two of them."""


class Way(ABC):
    """How the gradients of a run are summed.

    Attributes
    ----------
    team : Team
    note : str
        What the user should know of it.
    counted : dict
        By worker, steps in which it was not waited for, and gradients that it has left out; see `gather`.
    """

    note = ""

    def __init__(self, comm: Comm, members: Sequence[Sequence[int]], size: int, dtype: np.dtype):
        self.freed, self._comm = False, comm
        self.team = Team(comm, members, size, dtype)
        self.counted: dict[str, dict[str, int]] = {"not_waited_for": {}, "left_out": {}}
        self._exchange: Any = None
        self._left_out, self._taken, self._last, self._steps = 0, deque[float](maxlen=1000), 0.0, 0

    def needs_gradient(self) -> bool:
        """Whether this worker has to compute its next gradient of this step."""
        return True

    @abstractmethod
    def keep(self, number: int, gradient: np.ndarray) -> None:
        """Take the gradient of a block."""

    @abstractmethod
    def sum(self, gradient: np.ndarray) -> np.ndarray:
        """The sum of the gradients of all rows, on all ranks of the worker."""

    def _try_multicast(self, make: Callable[[Comm], Any], wanted: bool) -> str:
        """Make the exchange of the leaders, on all ranks or on none; returns why it does not work, or raises if it must."""
        try:
            with agreed(self._comm):
                if self.team.leaders is not None:
                    self._exchange = make(self.team.leaders)
        except TransportError as error:
            if wanted:
                raise
            return str(error)
        return ""

    def _shared(self, result: np.ndarray) -> np.ndarray:
        """The leader's ``result``, on all ranks of the worker, at the end of a step."""
        shared = self.team.shared(result)
        self.team.count()
        self._steps += 1
        if self._last:
            self._taken.append(self._comm.now() - self._last)
        self._last = self._comm.now()
        return shared

    def step_s(self) -> float | None:
        """Seconds of a step, as the median."""
        return median(self._taken) if self._taken else None

    def gather(self) -> None:
        """Fill `counted` with the figures of all workers. Collective."""
        late = getattr(self._exchange, "late", {})
        leading = self.team.leaders is not None
        everyone = self._comm.setup_allgather((dict(late), self.team.worker, self._left_out) if leading else None)
        found = [part for part in everyone if part is not None]
        total: Counter[int] = sum((Counter(late) for late, _, _ in found), Counter())
        self.counted = {"not_waited_for": {str(worker): min(count, self._steps)  # two others may have sent the same slice
                                           for worker, count in sorted(total.items())},
                        "left_out": {str(worker): count for _, worker, count in found if count}}

    def Free(self) -> None:
        """Collective."""
        self.freed = True
        if self._exchange is not None:
            self._exchange.Free()


def slots(ahead: int, nbytes: int) -> int:
    """Steps under way of so many bytes each."""
    return max(2, min(ahead, MEMORY_BYTES // max(nbytes, 1)))
