"""Ranks that must fail together: local work whose outcome every rank learns, and settings that must be equal.

Cost: one all-gather of a short pickled message each; `check_same_place` one all-reduce of 16 bytes while all is well.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpiddl import errors
from mpiddl.errors import CommError, DataError, MismatchError, MpiddlError, TransportError, UsageError
from mpiddl.transport.base import IN_PLACE, MAX
from mpiddl.transport.comm import Comm
from mpiddl.transport.uncaught import trace_of


@contextmanager
def agreed(comm: Comm) -> Iterator[None]:
    """Work of one's own, after which all ranks go on or all raise.

    An `MpiddlError` on some ranks is raised, in the same words, on every rank; the words say which ranks met it unless all
    did. Any other exception is a bug: it stays on its rank, and the others raise a `CommError` that names the rank.

    Communication
    -------------
    Collective over ``comm``: one all-gather when the block ends.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    known = isinstance(failure, MpiddlError)
    words = str(failure) if known else trace_of(failure) if failure else ""
    outcome = None if failure is None else (_kind(failure) if known else "", words)
    outcomes = comm.setup_allgather(outcome)
    if failure is not None and not known:
        failure.ranks = _name_ranks([rank for rank, other in enumerate(outcomes) if other])  # type: ignore[attr-defined]
        raise failure
    _raise_first(outcomes)


@contextmanager
def agreed_errors(comm: Comm) -> Iterator[None]:
    """`agreed` for checks of other packages: a ValueError or TypeError on one rank is a `DataError` on all.

    On one rank it stays what it is.
    """
    if comm.size == 1:
        yield
        return
    with agreed(comm):
        try:
            yield
        except (UsageError, DataError):
            raise
        except (ValueError, TypeError) as error:
            raise DataError(str(error)) from error


def _kind(failure: Exception) -> str:
    """The first class of ``failure`` that every rank knows: a derived class may be the caller's own."""
    return next(kind.__name__ for kind in type(failure).__mro__ if vars(errors).get(kind.__name__) is kind)


def _raise_first(outcomes: list[tuple[str, str] | None]) -> None:
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome is not None]
    if not failed:
        return
    kind, words = next(outcome for outcome in outcomes if outcome is not None)
    if not kind:
        raise CommError(f"rank {failed[0]} failed:\n{words}") from None
    same = [rank for rank in failed if outcomes[rank] == outcomes[failed[0]]]
    where = "" if len(same) == len(outcomes) else f" (on {_name_ranks(same)} of {len(outcomes)})"
    raise getattr(errors, kind)(words + where) from None


def tried(comm: Comm, name: str, make: Callable[[], object], aloud: bool = True) -> bool:
    """Whether ``make()`` works, or raises a `TransportError` on all ranks. Tried once for each communicator and ``name``.

    If it does not work, rank 0 prints one warning, if ``aloud``. It is tried once quietly, and once aloud.

    Communication
    -------------
    Collective at the first call: that of ``make``.
    """

    def first() -> list[bool]:
        try:
            make()
        except TransportError as error:
            if comm.rank == 0 and aloud:
                way = "MPI" if comm.processes else comm.library()
                warnings.warn(f"{error}; messages go through {way}", stacklevel=2)
            return [False]
        return [True]

    return bool(comm.kept((name, aloud), first)[0])


def check_equal(comm: Comm, what: str, values: Mapping[str, Any]) -> None:
    """Raise a `MismatchError` on every rank unless all ranks bring the same ``values``; it names keys and ranks.

    Communication
    -------------
    Collective over ``comm``: one all-gather.
    """
    everyone = comm.setup_allgather(dict(values))
    for key in everyone[0]:
        odd = [rank for rank, theirs in enumerate(everyone) if theirs.get(key) != everyone[0][key]]
        if odd:
            raise MismatchError(
                f"{what}: {key}: rank 0 got {everyone[0][key]!r}, but {_name_ranks(odd)} got {everyone[odd[0]].get(key)!r}; "
                "expected the same value on every rank"
            )


def check_same_place(comm: Comm, place: str) -> None:
    """Raise a `MismatchError` on every rank unless all ranks come here from the same ``place`` of a program, in few words.

    Communication
    -------------
    Collective over ``comm``: one all-reduce of 16 bytes; one all-gather if places differ.
    """
    number = zlib.crc32(place.encode())
    extremes = np.array([number, -number], np.int64)
    comm.Allreduce(IN_PLACE, extremes, MAX)
    if extremes[0] == -extremes[1]:
        return
    ranks: dict[str, list[int]] = {}
    for rank, theirs in enumerate(comm.setup_allgather(place)):
        ranks.setdefault(theirs, []).append(rank)
    got = " and ".join(f"{_name_ranks(there)} at {theirs}" for theirs, there in ranks.items())
    raise MismatchError(f"program: got {got}, expected that all ranks do the same. Does it depend on the numbers of a rank, or "
                        "on the time?")


def _name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
