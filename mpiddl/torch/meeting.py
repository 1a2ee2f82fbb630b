"""Agreement of all ranks on what comes next, so that no rank waits for a call that another rank will not make.

Each rank brings one row of numbers: what it is about to do, where it is in the program, and what this depends on. All ranks get
all rows. The ranks that are furthest behind act; the others take part without a contribution of their own, and meet again.
Ranks whose program is over take part in the same way, until all are over.

Cost: one all-reduce of 104 bytes for each rank; a second one with more than two sets of parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpiddl.errors import MismatchError
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm

T = TypeVar("T")

LAST = 1 << 52
"""Later than every batch and every epoch; float64 holds it exactly."""


class Event(IntEnum):
    """What a rank is about to do. Of two ranks at the same batch, that with the lower number acts first."""

    START = 0
    EPOCH = 1
    FORWARD = 2
    OVERLAP = 3
    GRADIENT = 4
    BACKWARD = 5
    STEP = 6
    EPOCH_END = 7
    SAVE = 8
    END = 9


class Passing(Enum):
    """Who computes a forward pass now, and with which samples."""

    SAME = "all ranks, with the same samples"
    DIFFERENT = "all ranks, with different samples"
    ALONE = "not all ranks"


class Row(NamedTuple):
    """What a rank brings to a meeting.

    event : the `Event`.
    epoch, batch : numbers of the epoch and of the batch.
    samples : samples in the gradient.
    touched : bit i: set i of parameters has a gradient.
    settings : checksum of the optimisers' settings; before a forward pass, of its samples.
    sums : 1: the loss is a sum over samples; 0: it is a mean.
    others : 1: there is a gradient of a parameter that is in no set.
    steps : steps taken by each set of parameters.
    """

    event: int
    epoch: int
    batch: int
    samples: int = 0
    touched: int = 0
    settings: int = 0
    sums: int = 0
    others: int = 0
    steps: tuple[int, ...] = ()

    @property
    def place(self) -> tuple[int, int, int]:
        """Where the rank is in the program: ranks with the lowest place are furthest behind."""
        return (self.epoch, self.batch, self.event) if self.event != Event.END else (LAST, LAST, self.event)


FIELDS = len(Row._fields) - 1


ROOM = 2
"""Sets of parameters in the first all-reduce of a meeting."""


def meet(comm: Comm, row: Row) -> list[Row]:
    """Return the rows of all ranks. A row has the steps of as many sets as its rank has.

    Communication
    -------------
    Collective: one all-reduce of ``comm.size * (FIELDS + 1 + 2 * ROOM)`` float64; if a rank has more than `ROOM` sets of
    parameters, one more for the others.
    """
    sets = [(row.touched >> number & 1, steps) for number, steps in enumerate(row.steps)]
    table = np.zeros((comm.size, FIELDS + 1 + 2 * ROOM))
    table[comm.rank, :FIELDS] = row._replace(touched=0)[:FIELDS]
    table[comm.rank, FIELDS] = len(sets)
    _fill(table[comm.rank, FIELDS + 1 :], sets[:ROOM])
    comm.Allreduce(IN_PLACE, table)
    most = int(table[:, FIELDS].max())
    if most > ROOM:
        more = np.zeros((comm.size, 2 * (most - ROOM)))
        _fill(more[comm.rank], sets[ROOM:])
        comm.Allreduce(IN_PLACE, more)
        table = np.hstack([table, more])
    found = []
    for line in table.astype(np.int64).tolist():
        count, rest = line[FIELDS], line[FIELDS + 1 :]
        touched = sum(flag << number for number, flag in enumerate(rest[: 2 * count : 2]))
        found.append(Row(*line[:FIELDS], tuple(rest[1 : 2 * count : 2]))._replace(touched=touched))  # type: ignore[call-arg, arg-type]
    return found


def _fill(line: np.ndarray, sets: list[tuple[int, int]]) -> None:
    for number, pair in enumerate(sets):
        line[2 * number : 2 * number + 2] = pair


def weights(rows: list[Row], active: list[int], rank: int) -> tuple[float, float]:
    """What makes the sum of the active ranks' gradients that of one rank: a factor of this rank's gradient before the sum, and
    one of the sum.

    Examples
    --------
    >>> rows = [Row(Event.GRADIENT, 1, 7, samples) for samples in (3, 1)]
    >>> weights(rows, [0, 1], 0), weights(rows, [0], 1)
    ((0.75, 1.0), (0.0, 1.0))
    """
    counts = [rows[each].samples for each in active]
    total, equal = sum(counts), len(active) == len(rows) and len(set(counts)) == 1
    if any(rows[each].sums for each in active) or equal:
        return float(bool(rows[rank].samples) or not total), 1 / (sum(count > 0 for count in counts) or len(rows))
    mine = rows[rank].samples / total if total else 1 / len(active)
    return mine if rank in active else 0.0, 1.0


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


def drawn(comm: Comm, source: int, draw: Callable[[], T] | None) -> T:
    """What ``draw`` returns on rank ``source``, or the error that it raises there. Collective; others need no ``draw``."""
    mine: Any = None
    if comm.rank == source:
        assert draw is not None
        try:
            mine = (draw(), None)
        except Exception as error:
            mine = (None, error)
    found, failure = comm.bcast(mine, source)
    if failure is not None:
        raise failure
    return found


def parted(rows: list[Row], ranks: list[int]) -> MismatchError:
    """The error if only ``ranks`` differentiate a forward pass that all ranks divided."""
    return _apart(rows, f"ranks {ranks[:8]} compute gradients of a forward pass that all ranks divided, the other ranks do not")


def different(rows: list[Row], ranks: list[int]) -> MismatchError:
    """The error if ``ranks`` have other parameters."""
    return _apart(rows, f"ranks {ranks[:8]} have other parameters in their optimisers than the other ranks, or another "
                        "optimiser")


def _apart(rows: list[Row], found: str) -> MismatchError:
    events = {rank: Event(row.event).name.lower().replace("_", " ") for rank, row in enumerate(rows)}
    return MismatchError(f"program: {found} (events: {events}); expected the same on all ranks. Does the program depend on "
                         "random numbers that no seed sets, or on the time?")
