"""Finds mistakes before the first run: in the data, and in each strategy on each number of workers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiddl.compare.backends import Place
from mpiddl.compare.grid import TUNING_SEED, Cell, Grid
from mpiddl.data import Data
from mpiddl.errors import CommError, UsageError
from mpiddl.layout import Layout
from mpiddl.training.builders import find_data
from mpiddl.training.request import Request, asked_for
from mpiddl.training.session import dry_run
from mpiddl.transport import virtual
from mpiddl.transport.virtual import Wire

LOOKED_AT = 64
"""Rows at either end of the data that its checksum covers."""


class Facts(NamedTuple):
    """About the data: rows of an epoch, and a fingerprint."""

    train_rows: int
    data: dict[str, Any]


def check(grid: Grid, place: Place, search: Sequence[Path]) -> Facts:
    """Open the data, and check the settings of each strategy without running it.

    Raises
    ------
    UsageError, DataError
        Something cannot be run; the message names the strategy.
    """
    job = grid.shared_job()
    data = find_data(job, search)
    if data.classes is None or data.test is None:
        came = "without test rows" if data.classes else "without classes"
        raise UsageError(f"data: got {data.name} {came}, expected classes and test rows, because compare reports test accuracy")
    facts = Facts(Layout(data.train.n, 1, 1, job.validation).train_rows, fingerprint(data))
    if Layout(data.train.n, 1, 1, job.validation).validation_rows < 1:
        raise UsageError(f"validation: got {job.validation:g}, which selects no row of {data.name}, expected a larger "
                         "share, because compare chooses the strategy on validation rows")  # fmt: skip
    tuning = [next(iter(grid.tuning(contender).values())) for contender in grid.contenders if contender.rates]
    for cell in [*tuning, *grid.with_first_rates().cells()]:
        # Virtual ranks cannot tell whether one rank can serve itself.
        if cell.seed in (grid.seeds[0], TUNING_SEED) and cell.workers > 1:
            _look(grid, place, cell, facts, data)
    return facts


def _look(grid: Grid, place: Place, cell: Cell, facts: Facts, data: Data) -> None:
    settings = {**grid.settings(cell, facts.train_rows), **place.settings(cell)}
    request = Request(data=data, quiet=True, settings=settings)
    try:
        virtual.run(place.ranks(cell), lambda comm: (asked_for(comm, request), dry_run(comm, request)), wire=Wire())
    except (UsageError, CommError) as error:
        if isinstance(error, CommError) and "simulate" not in settings:
            return  # virtual ranks cannot do it; real ranks will find out
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
