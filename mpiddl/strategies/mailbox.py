"""Messages of ranks that wait for nobody: they are taken as they come, and sent without a look whether they are.

A message that is found is received while its rank goes on; it is handed over once it is whole, and those of a rank in the
order in which it sent them. Who has nothing to do but to wait rests between two looks, so that a busy rank has the core to
itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

PAUSE_S = 0.0005
"""Between two looks of a rank that only waits."""


class Letter(NamedTuple):
    """A message: who sent it, under which tag, what it says."""

    source: int
    tag: int
    array: np.ndarray


class Mailbox:
    """A rank's; freed with its communicator.

    Parameters
    ----------
    comm : Comm
        On which nobody else receives messages.
    room : callable
        ``room(tag)`` makes the array that a message under ``tag`` is received into.
    """

    def __init__(self, comm: Any, room: Callable[[int], np.ndarray]):
        self._comm, self._room = comm, room
        self._coming: list[tuple[Any, Letter]] = []
        self._going: list[Any] = []

    def send(self, array: np.ndarray, dest: int, tag: int) -> None:
        """Begin to send ``array``, which must not be changed any more."""
        self._going = [request for request in self._going if not request.Test()]
        self._going.append(self._comm.Isend(array, dest, tag))

    def letters(self) -> Iterator[Letter]:
        """What has come, and is whole."""
        while (found := self._comm.Iprobe()) is not None:
            array = self._room(found.tag)
            request = self._comm.Irecv(array, found.source, found.tag)
            request.Test()  # a virtual rank takes it only now
            self._coming.append((request, Letter(found.source, found.tag, array)))
        whole, left, late = [], [], set[int]()
        for request, letter in self._coming:
            if letter.source in late or not request.Test():
                late.add(letter.source)
                left.append((request, letter))
            else:
                whole.append(letter)
        self._coming = left
        yield from whole

    @property
    def empty(self) -> bool:
        """Nothing is on its way that this rank knows of."""
        self._going = [request for request in self._going if not request.Test()]
        return not self._coming and not self._going

    def rest(self) -> None:
        """Wait a little for a message."""
        if self._comm.processes:
            time.sleep(PAUSE_S)
        else:
            self._comm.Probe()
