"""Whether ranks may read each other's memory: all know alike, and where one may not, all take another way."""

from __future__ import annotations

import os

import numpy as np
import pytest
from mpiddl.kernels.node_read_sum import FAILED, UNREAD

from mpiddl.collectives import allreduce
from mpiddl.collectives.reading import readable, reading
from mpiddl.errors import CommError
from mpiddl.transport import attach
from mpiddl.transport.base import SUM

pytestmark = pytest.mark.mpi


def test_whoever_may_read_knows_whom(link):
    others = attach.processes(link)
    assert others is None or others.tolist() == link.allgather(os.getpid())
    assert len(set(link.allgather(others is None))) == 1


@pytest.mark.mpi(min_size=2)
def test_where_one_rank_may_not_all_take_another_way(link, monkeypatch):
    if link.rank == 1:
        monkeypatch.setattr(attach, "_read", lambda process, address: None)
    assert attach.processes(link) is None and not readable(link)
    total = np.zeros(5)
    allreduce(link, np.arange(5.0), total, algorithm="read")
    np.testing.assert_array_equal(total, link.size * np.arange(5.0))


@pytest.mark.mpi(min_size=2)
def test_numbers_of_other_processes_are_not_taken_for_ranks(link, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in a container of its own
    assert attach.processes(link) is None


@pytest.mark.mpi(min_size=2)
def test_what_cannot_be_read_is_an_error_on_all_ranks(link):
    way = reading(link, np.dtype("f"), SUM)
    if way is None:
        pytest.skip("ranks may not read each other's memory on this machine")
    total = np.zeros(3, "f")
    way.run(way.allreduce(np.ones(3, "f"), total))
    assert total.tolist() == [link.size] * 3 and not way.barrier[1][UNREAD]
    link.patient_barrier(0.0)  # all have seen that nothing had failed
    if link.rank == 1:
        way.own[FAILED] = 1  # as the kernel does where the operating system refuses
    with pytest.raises(CommError, match="rank 1 could not read another rank's array"):
        way.run(way.allreduce(np.ones(3, "f"), total))
