"""How ranks and threads wait for a collective."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from mpiddl.collectives import allreduce
from mpiddl.machine import backoff

pytestmark = pytest.mark.no_mpi


@pytest.mark.mpi(min_size=2)
def test_a_thread_that_waits_for_long_sleeps(link, monkeypatch):
    """The last rank begins when each other rank has sent it a message before it sleeps."""
    last, messages, result = link.size - 1, [], np.zeros(1000)
    link.check_threads()

    def sleep(seconds):
        if not messages:
            messages.append(link.Isend(np.zeros(1), last, 7))
        time.sleep(seconds)

    def reduce():
        allreduce(link, np.arange(1000.0), result, algorithm="ring")

    reduce()  # what is set up with the first call is there
    if link.rank == last:
        for rank in range(last):
            link.Recv(np.zeros(1), rank, 7)
        reduce()
    else:
        monkeypatch.setattr(backoff, "time", SimpleNamespace(sleep=sleep))
        thread = threading.Thread(target=reduce)
        thread.start()
        thread.join()
        monkeypatch.undo()
        messages[0].Wait()
    np.testing.assert_array_equal(result, np.arange(1000) * link.size)
