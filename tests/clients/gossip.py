"""Client (iv): after each step ranks average their parameters in pairs, drawn anew each time; there is no collective at all.

Cost a step: V bytes out and V bytes in, whatever the number of ranks. With an odd number of ranks one pauses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpiddl.data.draws import permutation
from mpiddl.strategies import Strategy

PAIRS = 17  # purpose of the generator that draws the pairs


@dataclass(frozen=True)
class Gossip(Strategy):
    """Symmetric pairwise averaging: the mean of all ranks' parameters never changes by it."""

    seed: int = 0
    replicated = False

    def mix(self, comm, state, replica, step):
        partner = self.partner(comm.rank, comm.size, step.index)
        if partner is not None:
            theirs = np.empty_like(replica.params)
            comm.Sendrecv(replica.params, partner, 0, theirs, partner, 0)
            replica.params += theirs
            replica.params *= 0.5
        return state

    def partner(self, rank, size, index):
        """Neighbours in a random order form pairs; every rank draws the same order."""
        order = permutation(size, self.seed, PAIRS, epoch=index).tolist()
        place = order.index(rank)
        return order[place ^ 1] if place ^ 1 < size else None
