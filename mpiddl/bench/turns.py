"""Contenders in turns on all ranks of a communicator: every sample is the slowest rank's, between two barriers.

The order changes from turn to turn: nobody comes after the same one always, and finds caches as that one leaves them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpiddl.clock import now
from mpiddl.testbed import link_bytes

SAMPLE_S = 0.0005
"""Shorter calls are measured several at a time: a barrier's own unevenness is a microsecond or two."""

ROW, LONG_ROW = 3, 2
"""Samples of a contender one after the other, short or long ones: the first finds caches, and TCP's idea of the links, as the
one before it left them, and is not counted."""

LEAST = 5


@dataclass
class Contender:
    """Something to be measured.

    call : one operation, collective.
    sent : payload bytes that the ranks' own counters have seen so far; 0 where nobody counts.
    """

    call: Callable[[], Any]
    sent: Callable[[], int] = lambda: 0
    seconds: list[float] = field(default_factory=list)
    sent_bytes: int = 0
    link_bytes: int = 0


def take_turns(comm: Any, contenders: dict[str, Contender], seconds: float) -> None:
    """Measure all for about ``seconds``; fills in their samples, and the bytes of one call.

    Communication
    -------------
    Collective: barriers and a small all-gather a sample, beside what is measured.
    """
    estimates = {name: _count(comm, contender) for name, contender in contenders.items()}
    calls = {name: max(1, round(SAMPLE_S / estimate)) for name, estimate in estimates.items()}
    turn = sum(ROW * calls[name] * estimates[name] for name in contenders)
    names, draws = list(contenders), np.random.default_rng(0)  # the same on all ranks
    for _ in range(max(LEAST, round(seconds / turn)) if turn < seconds else LEAST):
        for name in map(names.__getitem__, draws.permutation(len(names))):
            row = ROW if estimates[name] < seconds / 50 else LONG_ROW
            contenders[name].seconds += [_sample(comm, contenders[name].call, calls[name]) for _ in range(row)][1:]


def _count(comm: Any, contender: Contender) -> float:
    """Seconds of one call as the second one takes them; its bytes are noted."""
    contender.call()
    comm.Barrier()
    before, before_link = contender.sent(), link_bytes().sent_bytes
    elapsed = _sample(comm, contender.call, 1)
    contender.sent_bytes = max(comm.allgather(contender.sent() - before))
    contender.link_bytes = max(comm.allgather(link_bytes().sent_bytes - before_link))
    return elapsed


def _sample(comm: Any, call: Callable[[], Any], count: int) -> float:
    """Seconds of a call, the mean of ``count``, on the slowest rank."""
    comm.Barrier()
    begin = now()
    for _ in range(count):
        call()
    return max(comm.allgather((now() - begin) / count))


def quantiles(samples: list[float]) -> tuple[float, float, float]:
    """10th percentile, median, 90th."""
    low, median, high = np.percentile(samples, (10, 50, 90)).tolist()
    return low, median, high
