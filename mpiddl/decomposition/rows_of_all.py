"""The parameter ``rows`` of estimators: each rank passes its own rows, or every rank passes all rows."""

from __future__ import annotations

from typing import Any

from mpiddl.data.digest import digest
from mpiddl.errors import MismatchError, UsageError
from mpiddl.transport.comm import Comm

OWN, ALL = "own", "all"


def check_rows(rows: Any) -> None:
    """Refuse a value that ``rows`` cannot have."""
    if rows not in (OWN, ALL):
        raise UsageError(f"rows: got {rows!r}, expected 'own' (each rank passes its own rows) or 'all' (every rank passes all "
                         "rows)")


def check_same(comm: Comm, *arrays: Any) -> None:
    """Raise a `MismatchError` on every rank unless all ranks have the same arrays.

    Communication
    -------------
    Collective: one all-gather of a few numbers.
    """
    digests = comm.allgather([None if array is None else digest(array) for array in arrays])
    odd = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if odd:
        raise MismatchError(f"rows: got other data on rank {odd[0]} than on rank 0, expected the same rows on every rank with "
                            "rows='all'; use rows='own', or set `random_state` where the data are drawn or split")
