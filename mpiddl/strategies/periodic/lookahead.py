"""Prediction of the parameters while sums of gradients are in flight.

The updates of these sums are still unknown, but a rank knows its own part of each sum. It makes provisional updates with its
own gradients in place of the means. The error is the difference between the rank's own gradients and the means. This is noise
if the rows are well mixed, and it adds up to zero over the ranks if their batches have the same size. On one rank there is no
error.
Source: a rank's own gradient in place of the mean until that arrives, Zhou et al. 2020, arXiv:2006.00441 (DaSGD), there with
late averages of parameters. Interpretation: the optimiser makes the provisional updates, on a copy of its moments, so that any
optimiser works; provisional updates are always discarded.
Cost: no communication; one update of the parameters for each sum in flight.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mpiddl.strategies.base import Replica
from mpiddl.transport.comm import Comm


class Ahead:
    """Makes provisional updates; holds the memory for them."""

    def __init__(self) -> None:
        self._moments: dict[str, np.ndarray] = {}
        self.freed = False

    def __call__(self, replica: Replica, gradients: Iterable[tuple[np.ndarray, int]], rate: float) -> None:
        """Update ``replica.params`` with sums of gradients, each with its number of samples, at learning rate ``rate``. The
        moments of the replica do not change."""
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
    """The `Ahead` of ``comm``; created at the first call."""
    return comm.kept(("ahead", size, dtype), Ahead)
