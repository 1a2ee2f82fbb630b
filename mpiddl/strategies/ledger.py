"""What workers of a parameter server agree on without waiting for each other: how many pushes are left, and when all meet.

Every push is first entered: so each is made at every shard or at none, and all shards see as many. A worker whose push was
the one that makes a meeting due, or came later, arrives and waits; the last to arrive lets all go, and who leaves for good lets
those that wait go without a meeting, for ever. Cost: a lock and some words in memory that a node shares.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.transport.guard import Guard

ENTERED, MET, ARRIVED, ROUND, LEFT = range(5)


class Ledger:
    """The words, as a rank of their node sees them.

    Parameters
    ----------
    comm : Comm
        Of all workers.
    words : ndarray of int64, shape (WORDS,)
        In shared memory, zero at first.
    """

    WORDS = Guard.WORDS + 16

    def __init__(self, comm: Any, words: np.ndarray):
        self._workers, self._guard, self._words = comm.size, Guard(comm, words[: Guard.WORDS]), words[Guard.WORDS :]

    def begin(self, entered: int, met: int) -> None:
        """Before anybody looks: go on after so many pushes and meetings."""
        self._words[ENTERED], self._words[MET] = entered, met

    @property
    def met(self) -> int:
        """Meetings so far, those that were passed over counted."""
        return int(self._words[MET])

    def enter(self, budget: int) -> bool:
        """Whether one more push of ``budget`` may be made; it is then counted."""
        with self._guard.held():
            free = int(self._words[ENTERED]) < budget
            self._words[ENTERED] += free
        return free

    def arrive(self, version: int, every: int, budget: int) -> int:
        """After a push that was the ``version``-th: 0, or the number of the meeting that this worker waits for."""
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
        """Whether all meet (1), nobody does (-1), or nobody knows yet (0)."""
        with self._guard.held():
            if self._words[ROUND] >= number:
                return 1
            return -int(self._words[LEFT] > 0)

    def leave(self) -> None:
        """This worker makes no more pushes."""
        with self._guard.held():
            self._words[LEFT] += 1
