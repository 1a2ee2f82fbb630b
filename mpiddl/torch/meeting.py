"""Agreement of all ranks on what comes next, so that no rank waits for a call that another rank will not make.

Each rank brings one row of numbers: what it is about to do, where it is in the program, and what this depends on. All ranks get
all rows. The ranks that are furthest behind act; the others take part without a contribution of their own, and meet again.
Ranks whose program is over take part in the same way, until all are over.

Cost: one all-reduce of 8 (7 + 2 sets) bytes for each rank.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm

LAST = 1 << 52
"""Later than every batch and every epoch; float64 holds it exactly."""


class Event(IntEnum):
    """What a rank is about to do. Of two ranks at the same batch, that with the lower number acts first."""

    START = 0
    EPOCH = 1
    FORWARD = 2
    GRADIENT = 3
    BACKWARD = 4
    STEP = 5
    EPOCH_END = 6
    END = 7


class Row(NamedTuple):
    """What a rank brings to a meeting.

    event : the `Event`.
    epoch, batch : numbers of the epoch and of the batch.
    samples : samples in the gradient.
    touched : bit i: set i of parameters has a gradient.
    settings : checksum of the optimisers' settings; before a forward pass, of its samples.
    sums : 1: the loss is a sum over samples; 0: it is a mean.
    steps : steps taken by each set of parameters.
    """

    event: int
    epoch: int
    batch: int
    samples: int = 0
    touched: int = 0
    settings: int = 0
    sums: int = 0
    steps: tuple[int, ...] = ()

    @property
    def place(self) -> tuple[int, int, int]:
        """Where the rank is in the program: ranks with the lowest place are furthest behind."""
        return (self.epoch, self.batch, self.event) if self.event != Event.END else (LAST, LAST, self.event)


FIELDS = len(Row._fields) - 1


def meet(comm: Comm, row: Row, sets: int) -> list[Row]:
    """Return the rows of all ranks. ``sets``: number of sets of parameters that ``row.steps`` has room for.

    Communication
    -------------
    Collective: one all-reduce of ``comm.size * (FIELDS + 2 * sets)`` float64.
    """
    table = np.zeros((comm.size, FIELDS + 2 * sets))
    table[comm.rank, :FIELDS] = row._replace(touched=0)[:FIELDS]
    table[comm.rank, FIELDS : FIELDS + len(row.steps)] = row.steps
    table[comm.rank, FIELDS + sets :] = [row.touched >> number & 1 for number in range(sets)]
    comm.Allreduce(IN_PLACE, table)
    found = []
    for line in table.astype(np.int64).tolist():
        touched = sum(flag << number for number, flag in enumerate(line[FIELDS + sets :]))
        row = Row(*line[:FIELDS], tuple(line[FIELDS : FIELDS + sets]))  # type: ignore[call-arg, arg-type]
        found.append(row._replace(touched=touched))
    return found


def behind(rows: list[Row]) -> list[int]:
    """The ranks that act next: those furthest behind.

    Examples
    --------
    >>> ahead, late = Row(Event.GRADIENT, 1, 7), Row(Event.GRADIENT, 1, 6)
    >>> behind([ahead, late, late]), behind([Row(Event.END, 0, 0), ahead])
    ([1, 2], [1])
    """
    lowest = min(row.place for row in rows)
    return [rank for rank, row in enumerate(rows) if row.place == lowest]
