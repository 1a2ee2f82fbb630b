"""Where the parameters will be when a gradient arrives that is late, as far as a rank can tell.

Between them and what is known stand the steps whose gradients are still on their way to all ranks. This rank has its own part
of each: it takes these steps with that in the place of the mean. What it computes there is late by nothing but the difference
of its own gradients and the mean, which is noise where rows are well mixed, and adds up to zero over the ranks where their
batches are of equal size. Alone it is late by nothing.
Source: a rank's own gradient in the place of the mean until that arrives, Zhou et al. 2020, arXiv:2006.00441 (DaSGD), there
with parameters that are averaged late. Interpretation: the optimiser itself takes the steps, on a copy of its moments, so that
any one will do; what is guessed is never kept.
Cost: nothing is sent; an update of the parameters for each step on the way.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mpiddl.strategies.base import Replica
from mpiddl.transport.base import Comm


class Ahead:
    """Moves parameters ahead; keeps the memory that this takes."""

    def __init__(self) -> None:
        self._moments: dict[str, np.ndarray] = {}
        self.freed = False

    def __call__(self, replica: Replica, gradients: Iterable[tuple[np.ndarray, int]], rate: float) -> None:
        """Move ``replica.params`` by updates at that rate with sums of gradients, each of so many samples; the moments stay as
        they are."""
        for name, moment in replica.moments.items():
            if name not in self._moments:
                self._moments[name] = np.empty_like(moment)
            np.copyto(self._moments[name], moment)
        for later, (grad, count) in enumerate(gradients):
            replica.apply(replica.params, grad, self._moments, rate, 1 / max(count, 1), replica.updates + later)

    def Free(self) -> None:
        """Local."""
        self.freed = True


def ahead(comm: Comm, size: int, dtype: np.dtype) -> Ahead:
    """The one of ``comm``; made at the first call."""
    return comm.kept(("ahead", size, dtype), Ahead)
