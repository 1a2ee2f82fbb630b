"""``Iallreduce`` of `mpiddl.Communicator` against the library's: several at once, waited for by ``MPI.Request.Waitall``.

This is how programs wait that send the buckets of a gradient. Two cases: the ranks wait at once, or compute first, for about as
long as the library's exchange takes. On one node the communicator uses the library's ``Iallreduce``. The contender "thread" is
mpiddl's algorithm, which a thread advances, so that the figures show what either choice costs. Inputs are written again before
each sample, and the seconds end when every rank has summed all results (`mpiddl.study.interleaved`). A row holds, beside what
every bench's rows hold: ``p10``, ``p90``, ``requests`` and ``computing`` (seconds of it that are computation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpiddl.bench.collectives import check_memory, size_text
from mpiddl.errors import MpiddlError
from mpiddl.machine.clock import now
from mpiddl.node.topology import neighbours
from mpiddl.study.interleaved import Contender, quantiles, take_turns
from mpiddl.transport.mpi import MpiComm, world
from mpiddl.transport.start import load_mpi

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
LIBRARY, OURS, THREAD = "library", "Communicator", "thread"

WORK = 16 << 10
"""Elements of an array that stays in the second cache: the computation takes no memory from the exchange."""

TRIES = 20
"""Of the number of rounds of computation that take as long as an exchange."""


def run(env: Any, requests: Sequence[int] = (1, 8), sizes: Sequence[int] = SIZES, seconds: float = 2.0) -> list[dict[str, Any]]:
    """Rows for every number of requests and every size of one, on rank 0; elsewhere none.

    Communication
    -------------
    Collective over ``COMM_WORLD``.
    """
    with world(env) as link:
        check_memory(link, max(sizes) * max(requests))
        from mpiddl.communicator import Communicator

        ours = Communicator(link.raw.Dup())
        rows: list[dict[str, Any]] = []
        for size in sizes:
            chosen = ours.why("allreduce", size).algorithm
            thread = Communicator(link.raw.Dup(), algorithms={"allreduce": "two-step" if chosen == LIBRARY else chosen})
            comms = {LIBRARY: link.raw, OURS: ours, THREAD: thread}
            rows += [row for count in requests for row in _case(link, comms, count, size, seconds)]
            thread.Free()
        ours.Free()
        return [] if link.rank else rows


def _case(link: MpiComm, comms: dict[str, Any], count: int, size: int, seconds: float) -> Iterator[dict[str, Any]]:
    source = np.full((count, max(1, size // 4)), link.rank + 1.0, np.float32)
    result = np.zeros_like(source)
    calls = {name: _exchange(comm, source, result) for name, comm in comms.items()}
    for name, call in calls.items():
        result[:] = 0
        call(0)
        if not all(link.allgather(bool((result == link.size * (link.size + 1) / 2).all()))):
            raise MpiddlError(f"bench: the result of {name} is wrong, so nothing was measured")

    def contenders(rounds: int) -> dict[str, Contender]:
        return {name: Contender(partial(call, rounds), write=partial(source.fill, 1), read=result.sum)
                for name, call in calls.items()}

    alone = contenders(0)
    take_turns(link, alone, seconds / 2)
    exchange = quantiles(alone[LIBRARY].seconds)[1]
    beside = contenders(_rounds(link, exchange))
    take_turns(link, beside, seconds / 2)
    for then, found, spent in (("Waitall", alone, 0.0), ("computation, then Waitall", beside, exchange)):
        case = f"{count} x {size_text(size)}, {then}, {neighbours(link).topology}"
        baseline = quantiles(found[LIBRARY].seconds)[1]
        for name, contender in found.items():
            low, median, high = quantiles(contender.seconds)
            yield {"case": case, "contender": name, "baseline": LIBRARY, "size_bytes": size, "requests": count,
                   "seconds": median, "baseline_seconds": baseline, "ratio": baseline / median, "p10": low, "p90": high,
                   "computing": spent}


def _exchange(comm: MpiComm, source: np.ndarray, result: np.ndarray) -> Callable[[int], None]:
    waitall, work = load_mpi().Request.Waitall, np.ones(WORK, np.float32)

    def call(rounds: int) -> None:
        requests = [comm.Iallreduce(mine, total) for mine, total in zip(source, result, strict=True)]
        for _ in range(rounds):
            np.sqrt(work, out=work)
        waitall(requests)

    return call


def _rounds(link: MpiComm, seconds: float) -> int:
    """Rounds of computation in so many seconds, while all ranks compute; the mean over the ranks, from several tries."""
    work, count = np.ones(WORK, np.float32), 0
    link.Barrier()
    end = now() + TRIES * seconds
    while now() < end:
        np.sqrt(work, out=work)
        count += 1
    return max(1, round(sum(link.allgather(count)) / link.size / TRIES))
