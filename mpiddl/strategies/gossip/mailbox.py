"""Nonblocking messages of asynchronous ranks.

Messages are received in the background and delivered when they are complete, in the order in which their rank sent them. A rank
that only waits sleeps between two polls, so that it does not take the core of a busy rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mpiddl.transport.comm import Comm

PAUSE_S = 0.0005
"""Seconds between two polls of a rank that only waits."""


class Letter(NamedTuple):
    """A received message: its source, tag and contents."""

    source: int
    tag: int
    array: np.ndarray


class Mailbox:
    """The messages of a rank; freed with its communicator.

    Parameters
    ----------
    comm : Comm
        A communicator on which no other code receives messages.
    room : callable
        ``room(tag)`` returns an array for a message with ``tag``.
    """

    def __init__(self, comm: Comm, room: Callable[[int], np.ndarray]):
        self._comm, self._room = comm, room
        self._coming: list[tuple[Any, Letter]] = []
        self._going: list[Any] = []

    def send(self, array: np.ndarray, dest: int, tag: int) -> None:
        """Start to send ``array``, which must not be changed afterwards."""
        self._going = [request for request in self._going if not request.Test()]
        self._going.append(self._comm.Isend(array, dest, tag))

    def letters(self) -> Iterator[Letter]:
        """The messages that are complete."""
        while (found := self._comm.Iprobe()) is not None:
            array = self._room(found.tag)
            request = self._comm.Irecv(array, found.source, found.tag)
            request.Test()  # a virtual rank receives the message here
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
        """No message of this rank is in flight, as far as it knows."""
        self._going = [request for request in self._going if not request.Test()]
        return not self._coming and not self._going

    def rest(self) -> None:
        """Wait a little for a message."""
        if self._comm.processes:
            time.sleep(PAUSE_S)
        else:
            self._comm.Probe()
