"""Contenders in turns on all ranks of a communicator, as programs would use them: every sample is the slowest rank's.

Before each call, and outside the clock, a rank writes its inputs again and enters a barrier. The clock stops when every rank
has also read its result. Otherwise data would stay in the cache where a call left them, and a call would seem several times as
fast as in a program. The order changes from turn to turn: a contender does not always find the caches as the same other one
leaves them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpiddl.machine.clock import now
from mpiddl.machine.link_counters import link_bytes
from mpiddl.transport.comm import Comm

SAMPLE_S = 0.0005
"""Of shorter calls, a sample is the mean of several: the ranks leave a barrier a microsecond or two apart."""

ROW, LONG_ROW = 3, 2
"""Samples of a contender one after the other, short or long ones: the first finds caches, and TCP's idea of the links, as the
one before it left them, and is not counted."""

LEAST = 5


@dataclass
class Contender:
    """Something to be measured.

    call : one operation, collective.
    sent : payload bytes that the ranks' own counters have seen so far; 0 if there is no counter.
    write : writes the inputs again, before each call.
    read : reads the result, after each call.
    seconds : of the samples, until the result is read.
    call_seconds : the same until the end of the call.
    """

    call: Callable[[], Any]
    sent: Callable[[], int] = lambda: 0
    write: Callable[[], Any] = lambda: None
    read: Callable[[], Any] = lambda: None
    seconds: list[float] = field(default_factory=list)
    call_seconds: list[float] = field(default_factory=list)
    sent_bytes: int = 0
    link_bytes: int = 0


def take_turns(comm: Comm, contenders: dict[str, Contender], seconds: float) -> None:
    """Measure all for about ``seconds``; fills in their samples, and the bytes of one call.

    Communication
    -------------
    Collective: a barrier for each call, and a small all-gather for each sample, beside what is measured.
    """
    estimates = {name: _count(comm, contender) for name, contender in contenders.items()}
    calls = {name: max(1, round(SAMPLE_S / estimate)) for name, estimate in estimates.items()}
    turn = sum(ROW * calls[name] * estimates[name] for name in contenders)
    names, draws = list(contenders), np.random.default_rng(0)  # the same on all ranks
    for _ in range(max(LEAST, round(seconds / turn)) if turn < seconds else LEAST):
        for name in map(names.__getitem__, draws.permutation(len(names))):
            row = ROW if estimates[name] < seconds / 50 else LONG_ROW
            samples = [_sample(comm, contenders[name], calls[name]) for _ in range(row)][1:]
            contenders[name].call_seconds += [called for called, _ in samples]
            contenders[name].seconds += [read for _, read in samples]


def _count(comm: Comm, contender: Contender) -> float:
    """Seconds of one call as the second one takes them; its bytes are noted."""
    contender.write()
    contender.call()
    comm.Barrier()
    before, before_link = contender.sent(), link_bytes().sent_bytes
    _, elapsed = _sample(comm, contender, 1)
    contender.sent_bytes = max(comm.setup_allgather(contender.sent() - before))
    contender.link_bytes = max(comm.setup_allgather(link_bytes().sent_bytes - before_link))
    return elapsed


def _sample(comm: Comm, contender: Contender, count: int) -> tuple[float, float]:
    """Seconds of a call, and of a call with the reading of its result, the mean of ``count``, on the slowest rank."""
    called = read = 0.0
    for _ in range(count):
        contender.write()
        comm.Barrier()
        begin = now()
        contender.call()
        called += now() - begin
        contender.read()
        read += now() - begin
    slowest = np.max(comm.setup_allgather((called / count, read / count)), axis=0)
    return float(slowest[0]), float(slowest[1])


def quantiles(samples: list[float]) -> tuple[float, float, float]:
    """10th percentile, median, 90th."""
    low, median, high = np.percentile(samples, (10, 50, 90)).tolist()
    return low, median, high
