"""Whether ranks may read each other's memory: all know alike, and where one may not, all take another way."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np
import pytest

from mpiddl.collectives import allreduce
from mpiddl.collectives.reading import reading
from mpiddl.kernels.node.node_read_sum import FAILED, UNREAD
from mpiddl.node import process_memory as attach
from mpiddl.node.process_memory import readable
from mpiddl.progress.started import run
from mpiddl.transport.base import SUM

pytestmark = pytest.mark.mpi


def test_ranks_read_each_other_exactly_where_the_operating_system_lets_them(link):
    mine = np.frombuffer(os.urandom(32), np.uint8)
    places = link.allgather((os.getpid(), mine.ctypes.data, mine.tobytes()))
    allowed = all(link.allgather(all(from_process(process, address) == wanted for process, address, wanted in places)))
    others = attach.processes(link)
    if others is None and "Seccomp:\t2" in Path("/proc/self/status").read_text():
        pytest.skip("a seccomp filter may forbid process_vm_readv and allow /proc")
    assert (others is not None) == allowed
    assert (readable(link) is not None) == (allowed and link.size > 1)
    if allowed:
        assert others.tolist() == [process for process, _, _ in places]


def from_process(process, address):
    """32 bytes of another process by /proc, for which Linux asks for the same rights as for process_vm_readv."""
    try:
        with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(32)
    except OSError:
        return None


@pytest.mark.mpi(min_size=2)
def test_where_one_rank_may_not_all_take_another_way(link, monkeypatch):
    if link.rank == 1:
        monkeypatch.setattr(attach, "_read", lambda process, address: None)
    assert attach.processes(link) is None and readable(link) is None
    total = np.zeros(5)
    allreduce(link, np.arange(5.0), total, algorithm="read")
    np.testing.assert_array_equal(total, link.size * np.arange(5.0))


@pytest.mark.mpi(min_size=2)
def test_numbers_of_other_processes_are_not_taken_for_ranks(link, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in a container of its own
    assert attach.processes(link) is None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", ["f", "d"])
@pytest.mark.parametrize("n", [3, 40_000])
def test_what_cannot_be_read_is_added_up_all_the_same(link, dtype, n):
    way = reading(link, np.dtype(dtype), SUM)
    if way is None:
        pytest.skip("ranks may not read each other's memory on this machine")
    sources = [np.random.default_rng(rank).standard_normal(n * link.size).astype(dtype) for rank in range(link.size)]
    sources[0][:2] = -0.0, np.inf
    own, wanted = sources[link.rank], functools.reduce(np.add, sources)
    others = attach.processes(link)
    known = others.copy()
    if link.rank == 1:
        others[:] = -1  # nobody's: as if the operating system refused
    try:
        for begin in (lambda *given: way.run(given), lambda *given: run(link, (), way.steps(given), True, way)):
            total, part, kept = np.zeros_like(own), np.zeros(n, dtype), own.copy()
            begin(*way.allreduce(own, total))
            assert total.tobytes() == wanted.tobytes()
            total[:] = 0
            begin(*way.reduce(own, total if link.rank == 1 else None))
            assert link.rank != 1 or total.tobytes() == wanted.tobytes()
            begin(*way.reduce_scatter(own, part))
            assert part.tobytes() == wanted[link.rank * n : (link.rank + 1) * n].tobytes()
            assert own.tobytes() == kept.tobytes()
            begin(*way.allreduce(kept, kept))
            assert kept.tobytes() == wanted.tobytes()
    finally:
        others[:] = known
    total[:] = 0
    way.run(way.allreduce(own, total))
    assert total.tobytes() == wanted.tobytes()
    assert not way.own[FAILED] and not way.barrier[1][UNREAD]  # what failed once is tried again
