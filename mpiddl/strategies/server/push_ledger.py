"""The ledger of a one-sided parameter server: it counts the remaining pushes and decides about meetings.

Every push is first entered in the ledger. It is then made at all shards or at none, so all shards receive the same number. A
meeting becomes due with a certain push. The worker of this push and all later ones arrive at the meeting and wait. The last
arrival releases all. A worker that leaves for good releases the waiting workers without a meeting, and there are no more
meetings. Cost: a lock and some words of shared memory.
"""

from __future__ import annotations

import numpy as np

from mpiddl.node.guard import Guard
from mpiddl.transport.comm import Comm

ENTERED, MET, ARRIVED, ROUND, LEFT = range(5)


class Ledger:
    """The ledger, as seen by a rank of its node.

    Parameters
    ----------
    comm : Comm
        All workers.
    words : ndarray of int64, shape (WORDS,)
        Shared memory, initially zero.
    """

    WORDS = Guard.WORDS + 16

    def __init__(self, comm: Comm, words: np.ndarray):
        self._workers, self._guard, self._words = comm.size, Guard(comm, words[: Guard.WORDS]), words[Guard.WORDS :]

    def begin(self, entered: int, met: int) -> None:
        """Set the numbers of earlier pushes and meetings. Called before all other accesses."""
        self._words[ENTERED], self._words[MET] = entered, met

    @property
    def met(self) -> int:
        """Number of meetings so far, including skipped ones."""
        return int(self._words[MET])

    def enter(self, budget: int) -> bool:
        """Enter a push. Returns False if all ``budget`` pushes have been made."""
        with self._guard.held():
            free = int(self._words[ENTERED]) < budget
            self._words[ENTERED] += free
        return free

    def arrive(self, version: int, every: int, budget: int) -> int:
        """After push number ``version``: return the number of the meeting to wait for, or 0."""
        with self._guard.held():
            words = self._words
            if not every or words[LEFT] or not (words[MET] + 1) * every <= version < budget:
                return 0
            words[ARRIVED] += 1
            number = int(words[ROUND]) + 1
            if words[ARRIVED] == self._workers:
                words[ARRIVED], words[ROUND], words[MET] = 0, number, version // every
        return number

    def decided(self, number: int) -> int:
        """1: all ranks meet; -1: there is no meeting; 0: not yet decided."""
        with self._guard.held():
            if self._words[ROUND] >= number:
                return 1
            return -int(self._words[LEFT] > 0)

    def leave(self) -> None:
        """Record that this worker makes no more pushes."""
        with self._guard.held():
            self._words[LEFT] += 1
