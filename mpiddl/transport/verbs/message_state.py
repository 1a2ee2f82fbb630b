"""What a rank knows of its messages over queue pairs: their header, those that wait, and the state of each peer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from mpiddl.transport.base import ANY_SOURCE, ANY_TAG
from mpiddl.transport.verbs.operations import Operation
from mpiddl.transport.verbs.work_requests import Memory

IMMEDIATE = 0xFFFFFFFF
"""The bits of a transfer's number that a write carries with it."""

HEADER = Struct("=4i2q2Q")
"""Of each message: form, credits, group, tag, number of the transfer (its sender chooses it), bytes; address and key of a
rendezvous."""


class Form(IntEnum):
    """What a message is."""

    DATA = 1
    OFFER = 2  # read form: where the data is
    ASK = 3  # write form: how much there is
    PLACE = 4  # the answer: where it goes
    TAKEN = 5  # the end of the read form
    CREDITS = 6
    REFUSED = 7  # the receiver cannot take the transfer
    WITHDRAWN = 8  # the sender of the write form cannot send it


@dataclass
class Arrival:
    """A message, or the announcement of one, that no receive has taken yet.

    data : its bytes, if they have come with it.
    memory : where the sender has them (read form), or None.
    """

    source: int
    group: int
    tag: int
    number: int
    nbytes: int
    data: np.ndarray | None = None
    memory: Memory | None = None


@dataclass
class Receive:
    """A receive that was posted."""

    operation: Operation
    array: np.ndarray
    group: int
    source: Any
    tag: Any

    def takes(self, arrival: Arrival) -> bool:
        return (arrival.group == self.group and self.source in (ANY_SOURCE, arrival.source)
                and self.tag in (ANY_TAG, arrival.tag))


class Entry(NamedTuple):
    """Something that waits for a credit.

    go : sends it.
    operation : fails if the peer is lost before.
    """

    go: Callable[[], None]
    operation: Operation | None


@dataclass
class Peer:
    """The state of the messages to and from one peer.

    credits : how many sends it has receives for.
    owed : receives that were posted again since the peer was last told its credits.
    urgent, waiting : what there are no credits for. Answers are urgent.
    place : the next eager buffer.
    numbers : of transfers that this rank began.
    sending : transfers of this rank that wait for an answer, by number: the operation and the array.
    taking : writes that this rank waits for, by number: the operation of the receive.
    """

    credits: int
    owed: int = 0
    urgent: deque[Entry] = field(default_factory=deque)
    waiting: deque[Entry] = field(default_factory=deque)
    place: int = 0
    numbers: int = 0
    sending: dict[int, tuple[Operation, np.ndarray]] = field(default_factory=dict)
    taking: dict[int, Operation] = field(default_factory=dict)
    trouble: Exception | None = None
