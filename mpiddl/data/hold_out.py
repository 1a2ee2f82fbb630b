"""A held-out part of a source that has no test set of its own: the same rows whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import UsageError
from .base import Rows, Source, label_place
from .draws import HOLD_OUT, permutation

TEST_FRACTION = 0.2  # one row in five, the usual share when a data set comes without a test set


class Subset:
    """Chosen rows of another source.

    Parameters
    ----------
    source : Source
        Where the rows are.
    rows : int64 (n,)
        Which rows, ascending.
    """

    def __init__(self, source: Source, rows: np.ndarray):
        self._source, self._rows = source, rows
        self.n = len(rows)
        self.shape, self.classes, self.targets = source.shape, source.classes, source.targets

    def read(self, ranges: Sequence[range]) -> list[Rows]:
        """Return copies of the chosen rows; those between the first and last of a range are passed over."""
        chosen = [self._rows[rows.start : rows.stop] for rows in ranges]
        # The chosen rows ascend, so the spans that cover them are disjoint and ascend as well.
        spans = [range(rows[0], rows[-1] + 1) if len(rows) else range(0) for rows in chosen]
        read = self._source.read(spans)
        return [
            (x[rows - span.start], y[rows - span.start])
            for (x, y), rows, span in zip(read, chosen, spans, strict=True)
        ]

    def where(self, row: int) -> str:
        """Return where the row is in the source it was chosen from."""
        return self._source.where(int(self._rows[row]))

    def where_label(self, row: int) -> str:
        """Return where the row's label is in the source it was chosen from."""
        return label_place(self._source)(int(self._rows[row]))


def hold_out(source: Source, fraction: float = TEST_FRACTION, seed: int = 0) -> tuple[Source, Source | None]:
    """Split a source by a fixed permutation of its rows into one to train on and one to test on.

    Parameters
    ----------
    source : Source
        The rows to split.
    fraction : float
        Fraction of the rows held out, in [0, 1): at least one row on either side.
    seed : int
        Chooses the permutation. It is not the seed of a run, so that all runs are tested on the same rows.

    Returns
    -------
    tuple of Source and (Source or None)
        The rows that are left, and those held out: None if ``fraction`` is 0 or there is a single row.

    Raises
    ------
    UsageError
        If ``fraction`` is outside [0, 1); the same on every rank.
    """
    if not 0 <= fraction < 1:
        raise UsageError(f"test_fraction: got {fraction}, expected a number of at least 0 and less than 1")
    if fraction == 0 or source.n < 2:
        return source, None
    held_out = min(max(round(fraction * source.n), 1), source.n - 1)
    order = permutation(source.n, seed, HOLD_OUT)
    return Subset(source, np.sort(order[held_out:])), Subset(source, np.sort(order[:held_out]))
