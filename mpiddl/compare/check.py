"""What can be known to go wrong before the first run: the data, and each strategy on each number of workers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiddl.compare.grid import Cell, Grid
from mpiddl.compare.places import Place
from mpiddl.data import Data
from mpiddl.errors import CommError, UsageError
from mpiddl.layout import Layout
from mpiddl.recipes import find_data
from mpiddl.request import Request, asked_for
from mpiddl.session import dry_run
from mpiddl.transport import virtual
from mpiddl.transport.virtual import Wire

LOOKED_AT = 64
"""Rows at either end of the data that its checksum is of."""


class Facts(NamedTuple):
    """About the data: rows of an epoch, and what tells it from other data of the same name."""

    train_rows: int
    data: dict[str, Any]


def check(grid: Grid, place: Place, search: Sequence[Path]) -> Facts:
    """Open the data, and have each strategy look at its runs without doing them.

    Raises
    ------
    UsageError, DataError
        Something cannot be run as asked; the message names the strategy.
    """
    job = grid.shared_job()
    data = find_data(job, search)
    if data.classes is None or data.test is None:
        came = "without test rows" if data.classes else "whose labels are no classes"
        raise UsageError(f"data: got {data.name}, {came}, expected both: strategies are compared by accuracy on test rows")
    facts = Facts(Layout(data.train.n, 1, 1, job.validation).train_rows, fingerprint(data))
    if grid.target and Layout(data.train.n, 1, 1, job.validation).validation_rows < 1:
        raise UsageError(f"target: got one with no validation row in {data.name}, expected validation large enough for one")
    for cell in grid.cells():
        if cell.seed == grid.seeds[0] and cell.workers > 1:  # whether one rank can serve itself is not known on virtual ranks
            _look(grid, place, cell, facts, data)
    return facts


def _look(grid: Grid, place: Place, cell: Cell, facts: Facts, data: Data) -> None:
    settings = {**grid.settings(cell, facts.train_rows), **place.settings(cell)}
    request = Request(None, data, None, None, False, False, True, None, None, settings)
    try:
        virtual.run(place.ranks(cell), lambda comm: (asked_for(comm, request), dry_run(comm, request)), wire=Wire())
    except (UsageError, CommError) as error:
        if isinstance(error, CommError) and "simulate" not in settings:
            return  # virtual ranks cannot do it; whether these can they find out themselves
        raise UsageError(f"{cell.contender.label} on {cell.workers} workers: {error}") from None


def fingerprint(data: Data) -> dict[str, Any]:
    """Rows, columns, and a checksum of the first and the last training rows."""
    n = data.train.n
    few = min(LOOKED_AT, n)
    ranges = [range(few)] if n <= 2 * few else [range(few), range(n - few, n)]
    checksum = 0
    for x, y in data.train.read(ranges):
        checksum = zlib.crc32(np.ascontiguousarray(y).data, zlib.crc32(np.ascontiguousarray(x).data, checksum))
    return {"rows": n, "test_rows": data.test.n if data.test else 0, "features": data.features, "checksum": checksum}
