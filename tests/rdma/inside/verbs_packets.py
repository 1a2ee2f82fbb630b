"""Packets as the device counts them: as many as the formula says, so nothing is sent that is not needed."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from mpiddl.remote_memory import allocate

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.limit(120)]

COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
MTU, UNACKNOWLEDGED = 4096, 64

TRIES = 40


def counters():
    """Packets sent, and repeated. The system renews these counters some times a second, so it is asked until they are new."""
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        found = [int((COUNTERS / name).read_text()) for name in ("sent_pkts", "completer_retry_err", "duplicate_request")]
    return np.array(found)


@pytest.mark.parametrize(("nbytes", "times"), [(0, 20), (1, 20), (4096, 20), (4097, 20), (100_000, 5), (300_000, 1),
                                               (1 << 20, 1)])  # fmt: skip
def test_packets_of_a_write(link, nbytes, times):
    """ceil(n / MTU) data packets, at least one; an acknowledgement at the end, and one for each 65 packets before.

    soft-RoCE sometimes repeats packets of long messages; it counts that, and such a turn does not count here.
    """
    memory, array, data = allocate(link, max(nbytes, 1), 0, "verbs"), np.ones(nbytes, np.uint8), max(1, -(-nbytes // MTU))
    memory.register(array)
    found = 0
    for _ in range(TRIES):
        link.Barrier()
        if link.rank == 0:
            before = counters()
            for _ in range(times):
                memory.write(1, 0, array).Wait()
            sent, *again = (counters() - before).tolist()
            found = 0 if any(again) else sent
        found = link.bcast(found, 0)
        if found:
            break
    assert found == times * (data + 1 + (data - 1) // (UNACKNOWLEDGED + 1))
    link.Barrier()
    memory.Free()
