"""Where the parameters will be when a gradient arrives that is late: after as many steps in which momentum alone moves them.

A gradient that is computed there, and not where the parameters are, is late only by what other gradients do meanwhile. With
plain SGD that is the same place.
Source: weight prediction, Chen, Yang & Cheng 2018, arXiv:1809.02839 (SpecTrain), for pipelines of layers; Hakimi et al. 2019,
arXiv:1907.11612 (DANA), for parameter servers. Interpretation: the optimiser itself is asked, with gradients of zero, so that
any one will do.
Cost: nothing is sent; ``steps`` updates of a copy of the moments.
"""

from __future__ import annotations

import numpy as np

from mpiddl.memory import aligned_zeros
from mpiddl.strategies.base import Replica
from mpiddl.transport.base import Comm


class Ahead:
    """Moves parameters ahead; keeps the memory that this takes, for one size and dtype."""

    def __init__(self, size: int, dtype: np.dtype):
        self._nothing = aligned_zeros(size, dtype)
        self._moments: dict[str, np.ndarray] = {}
        self.freed = False

    def __call__(self, replica: Replica, steps: int, rate: float, updates: int) -> None:
        """Move ``replica.params`` by ``steps`` updates at that rate, the moments having seen ``updates``; these stay."""
        for name, moment in replica.moments.items():
            np.copyto(self._moments.setdefault(name, np.empty_like(moment)), moment)
        for later in range(steps):
            replica.apply(replica.params, self._nothing, self._moments, rate, 1.0, updates + later)

    def Free(self) -> None:
        """Local."""
        self.freed = True


def ahead(comm: Comm, size: int, dtype: np.dtype) -> Ahead:
    """The one of ``comm``; made at the first call."""
    return comm.kept(("ahead", size, dtype), lambda: Ahead(size, dtype))
