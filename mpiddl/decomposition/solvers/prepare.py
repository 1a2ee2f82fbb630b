"""Rows in units that can be squared, and about an origin that does not drown their differences.

A few rows of all ranks tell how large entries are, and how far from zero beside how much they differ. Where that is within
what the dtype bears, nothing is done. Else rows are multiplied by a power of two, and what they have in common is
subtracted, before anything is multiplied: a copy of rows in memory, chunk by chunk of those in a file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpiddl.decomposition.rows.base import Rows
from mpiddl.decomposition.rows.covariance import NotFinite
from mpiddl.decomposition.solvers.sample import strata
from mpiddl.transport.comm import Comm

LOOKED_AT = 24
"""Rows of all ranks together."""

BORNE = 2.0**20
"""Entries up to this, and from its inverse on, are left as they are: their squares have squares."""

SQUARED = 1e150
"""Entries beyond it have no variance in float64."""

LARGEST_UNDONE = 2.0**400
"""Variances of rows that were multiplied by more may lose digits in the units of the rows, or be zero."""

FAR = {4: 64.0, 8: 2.0**20}
"""How many times their deviation the means may be away from zero, by the dtype's bytes."""


class Prepared(NamedTuple):
    """Rows (x - shift) scale; a trace of their covariance below ``floor`` is rounding of numbers so far from zero."""

    rows: Rows
    shift: np.ndarray
    scale: float
    floor: float

    def undone(self, result: Any) -> Any:
        """A `Result` in the units of the rows as they came; only variances that are too small for float64 stay scaled."""
        scaled = replace(result, mean=result.mean / self.scale + self.shift, unit=1 / self.scale)
        return scaled if self.scale > LARGEST_UNDONE else scaled.in_unit(1.0)


def prepare(comm: Comm, rows: Rows, n: int, center: bool, seed: int) -> Prepared:
    """The same ``rows``, or such as can be worked with.

    Communication
    -------------
    Collective: two all-gathers, of a number and of 2 d + 1.
    """
    wanted = -(-min(LOOKED_AT, n) * rows.n // max(1, n))
    some = rows.take(strata(rows.n, wanted, np.random.default_rng([seed, comm.rank, 5])))
    blocks = [x.astype(np.float64) for x, _ in some.blocks(LOOKED_AT)]
    x = np.concatenate([np.zeros((0, rows.d)), *blocks])
    largest = float(np.max(comm.allgather(float(np.abs(x).max(initial=0.0)))))  # NaN stays NaN
    if not largest < SQUARED:
        raise NotFinite
    if largest == 0:
        return Prepared(rows, np.zeros(rows.d), 1.0, 0.0)
    x /= largest
    counts, sums, squares = zip(*comm.allgather((len(x), x.sum(axis=0), (x**2).sum(axis=0))), strict=True)
    mean = np.sum(sums, axis=0) / sum(counts)
    variance = float(np.maximum(np.sum(squares, axis=0) / sum(counts) - mean**2, 0.0).mean())
    away, spread = float(np.sqrt((mean**2).mean())) * largest, float(np.sqrt(variance)) * largest
    eps = float(np.finfo(rows.dtype).eps)
    far = center and not rows.sparse and away > FAR[rows.dtype.itemsize] * spread
    shift = (mean * largest).astype(rows.dtype).astype(np.float64) if far else np.zeros(rows.d)
    size = max(spread, eps * away) if far else max(spread, away)
    scale = 1.0 if 1 / BORNE <= size <= BORNE else 2.0 ** min(-round(np.log2(size)), 1000)
    floor = rows.d * (16 * eps * away * scale) ** 2 if center else 0.0
    if scale == 1.0 and not far:
        return Prepared(rows, shift, 1.0, floor)
    return Prepared(rows.moved(shift, scale), shift, scale, floor)
