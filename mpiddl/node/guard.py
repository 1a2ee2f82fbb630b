"""Memory that one rank of a node at a time may write, and all may copy: a fair lock and a count of changes over it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from mpiddl import kernels
from mpiddl.errors import CommError
from mpiddl.machine.clock import now
from mpiddl.transport.base import PATIENCE
from mpiddl.transport.comm import Comm

PAUSE_S = 0.0001
"""Slept by who has waited for a millisecond: the rank it waits for may need the core."""

TRIES = 3
"""Copies that a change came into, before the next is made under the lock: no writer can keep a reader out for ever."""


class Guard:
    """A lock, and the number of changes made under it. One a thread; all over the same words.

    Parameters
    ----------
    comm : Comm
        What it lets go on while it waits.
    words : ndarray of int64, shape (WORDS,)
        In memory that the ranks share, zero at first.
    limit_s : float, optional
        Seconds after which waiting is given up.

    Raises
    ------
    CommError
        By whatever waits, if there is a limit and it has passed.
    """

    WORDS = 64
    """`mpiddl.kernels.node.lock.WORDS`, without loading it."""

    CHANGES = 32
    """Of these, which one counts: twice the changes, and 1 more during a change (`mpiddl.kernels.node.lock.COUNT`)."""

    def __init__(self, comm: Comm, words: np.ndarray, limit_s: float = float("inf")):
        self._comm, self._words, self._limit_s, self._lock = comm, words, limit_s, kernels.lock
        self._state = np.zeros(kernels.lock.STATE, np.int64)

    @property
    def changes(self) -> int:
        """How many there have been so far."""
        return int(self._lock.changes(self._words, 0)) // 2

    @changes.setter
    def changes(self, count: int) -> None:
        """Before anybody else looks."""
        self._words[self._lock.COUNT] = 2 * count

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the lock during a block, after all who came before. Others get it afterwards, also after an exception."""
        until = now() + self._limit_s
        try:
            while not self._lock.acquire(self._words, self._state, PATIENCE):
                self._pause(until)
            yield
        finally:
            self._lock.leave(self._words, self._state)

    @contextmanager
    def changing(self) -> Iterator[int]:
        """The same, to write; yields the number of changes before this one."""
        with self.held():
            yield int(self._lock.begin_change(self._words, self._state))

    def copy(self, source: np.ndarray, target: np.ndarray) -> int:
        """Copy what is guarded as it was between two changes; returns after how many of them."""
        until, tries = now() + self._limit_s, 0
        while tries < TRIES:
            count = int(self._lock.changes(self._words, PATIENCE))
            if count % 2:
                self._pause(until)
                continue
            np.copyto(target, source)
            if self._lock.unchanged(self._words, count):
                return count // 2
            tries += 1
        with self.held():
            np.copyto(target, source)
            return self.changes

    def _pause(self, until: float) -> None:
        if now() > until:
            raise CommError(f"shared memory: a lock was not released within {self._limit_s:g} s")
        self._comm.progress()
        time.sleep(PAUSE_S)
