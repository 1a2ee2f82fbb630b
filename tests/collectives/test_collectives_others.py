"""Reduce-scatter, all-gather, broadcast, reduce and barrier against numpy: every algorithm, root and length."""

from __future__ import annotations

import time

import numpy as np
import pytest
from harness import queue_transport
from harness.reductions import LAYOUTS, REAL, fold, given, lengths, ops, placed

from mpiddl.collectives import allgather, barrier, broadcast, calls, reduce, reduce_scatter, ring
from mpiddl.collectives.allgather_ring import allgather_ring
from mpiddl.collectives.wire import wire
from mpiddl.layout import block_bounds
from mpiddl.transport import virtual
from mpiddl.transport.base import IN_PLACE, MAX, REDUCED, SUM
from mpiddl.tuning.rule import READ

pytestmark = pytest.mark.no_mpi

ON = ["1", "2", "2+1", "2+2 in turn", "1+4 mixed", "3+3 in turn", "4+4+4"]


def check_reduce_scatter(comm, algorithm, dtypes, sizes):
    for dtype in dtypes:
        for op in ops(dtype):
            for n in sizes:
                begin, end = block_bounds(n, comm.size, comm.rank)
                mine, block = given(comm.rank, n, dtype), np.empty(end - begin, dtype)
                reduce_scatter(comm, mine, block, op, algorithm=algorithm)
                np.testing.assert_array_equal(block, fold(comm.size, n, dtype, op)[begin:end])
                np.testing.assert_array_equal(mine, given(comm.rank, n, dtype))


def check_allgather(comm, dtypes, sizes):
    for dtype in dtypes:
        for n in sizes:
            begin, end = block_bounds(n, comm.size, comm.rank)
            whole, result = given(77, n, dtype), np.zeros(n, dtype)
            allgather(comm, whole[begin:end].copy(), result)
            np.testing.assert_array_equal(result, whole)


def check_broadcast(comm, algorithm, dtypes, sizes):
    for dtype in dtypes:
        for n in sizes:
            for root in range(comm.size):
                buf = given(comm.rank + 1, n, dtype)
                broadcast(comm, buf, root, algorithm=algorithm)
                np.testing.assert_array_equal(buf, given(root + 1, n, dtype))


def check_reduce(comm, algorithm, dtypes, sizes):
    for dtype in dtypes:
        for op in ops(dtype)[::2]:
            for n in sizes:
                for root in range(comm.size):
                    mine, wanted = given(comm.rank, n, dtype), fold(comm.size, n, dtype, op)
                    result = np.zeros(n, dtype) if comm.rank == root else None
                    reduce(comm, mine, result, op, root, algorithm=algorithm)
                    np.testing.assert_array_equal(mine, given(comm.rank, n, dtype))
                    if comm.rank == root:
                        np.testing.assert_array_equal(result, wanted)
                    reduce(comm, IN_PLACE if comm.rank == root else mine, mine, op, root, algorithm=algorithm)
                    np.testing.assert_array_equal(mine, wanted if comm.rank == root else given(comm.rank, n, dtype))


CHECKS = {
    **{f"reduce_scatter {name}": lambda comm, *more, name=name: check_reduce_scatter(comm, name, *more)
       for name in ("ring", "read")},
    "allgather": check_allgather,
    **{f"broadcast {name}": lambda comm, *more, name=name: check_broadcast(comm, name, *more)
       for name in ("auto", *calls.BROADCAST)},
    **{f"reduce {name}": lambda comm, *more, name=name: check_reduce(comm, name, *more)
       for name in ("auto", READ, *calls.REDUCE)},
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("layout", ON)
def test_virtual_ranks(layout, check):
    nodes = LAYOUTS[layout]
    sizes = lengths(len(nodes)) if len(nodes) < 6 else [1, len(nodes) - 1, len(nodes) + 1]
    virtual.run(len(nodes), lambda comm: CHECKS[check](comm, "l", sizes), nodes)


@pytest.mark.parametrize("check", CHECKS)
def test_every_dtype(check):
    virtual.run(3, lambda comm: CHECKS[check](comm, REDUCED, [5]))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_transport_that_only_moves_messages(size, check):
    queue_transport.run(size, lambda comm: CHECKS[check](comm, "l", lengths(size)))
    queue_transport.run(size, lambda comm: CHECKS[check](comm, "fF", [5]))


@pytest.mark.mpi
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("layout", ["one", "in turn"])
def test_real_ranks(link, layout, check):
    CHECKS[check](placed(link, layout), "f", [*lengths(link.size), 100_001])


@pytest.mark.mpi
@pytest.mark.parametrize("check", CHECKS)
def test_real_ranks_every_dtype(link, check):
    CHECKS[check](link, REDUCED[::3], [link.size + 1])


ALGORITHMS = {
    "broadcast binomial": lambda way, mine, total, root, few: calls.broadcast_binomial(way, mine, root, largest=few),
    "broadcast scatter": lambda way, mine, total, root, few: calls.broadcast_scatter(
        way, mine, root, largest=few, segment_bytes=8 * few
    ),
    "broadcast chain": lambda way, mine, total, root, few: calls.broadcast_chain(way, mine, root, segment_bytes=8 * few),
    "reduce binomial": lambda way, mine, total, root, few: calls.reduce_binomial(way, mine, total, SUM, root, largest=few),
    "reduce scatter": lambda way, mine, total, root, few: calls.reduce_scatter_gather(
        way, mine, total, SUM, root, largest=few, segment_bytes=8 * few
    ),
}


def check_cut(comm, name, few):
    """Messages of so many elements at most, as if the library took no more."""
    kind, longest = name.split()[0], 0
    way = wire(comm)
    send = way.comm.Isend

    def Isend(buf, dest, tag):
        nonlocal longest
        longest = max(longest, buf.size)
        return send(buf, dest, tag)

    way.comm.Isend = Isend
    for root in range(comm.size):
        n = 11 * comm.size + 3
        mine, total = given(comm.rank, n, "d"), np.zeros(n)
        for request in ALGORITHMS[name](way, mine, total, root, few):
            request.Wait()
        if kind == "broadcast":
            np.testing.assert_array_equal(mine, given(root, n, "d"))
        else:
            np.testing.assert_array_equal(total, fold(comm.size, n, "d", SUM) if comm.rank == root else np.zeros(n))
    assert longest <= few


@pytest.mark.parametrize("few", [1, 5])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_no_message_is_longer_than_the_library_takes(size, name, few):
    virtual.run(size, lambda comm: check_cut(comm, name, few))


@pytest.mark.mpi
@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_message_of_real_ranks_is_longer_than_the_library_takes(link, name):
    check_cut(link, name, 3)


def test_the_ring_cuts_what_the_library_would_not_take(monkeypatch):
    monkeypatch.setattr(ring, "LARGEST", 4)
    virtual.run(3, lambda comm: CHECKS["reduce_scatter ring"](comm, "l", [50]))

    def program(comm):
        way, n = wire(comm), 50
        result = np.zeros(n)
        begin, end = block_bounds(n, comm.size, comm.rank)
        for request in allgather_ring(way, np.arange(50.0)[begin:end], result):
            request.Wait()
        np.testing.assert_array_equal(result, np.arange(50.0))
        return way.comm.meter.messages

    assert virtual.run(3, program) == [10, 10, 10]  # chunks of 17 and 16 elements: five messages in each of two rounds


def test_nobody_leaves_a_barrier_before_the_last_has_come():
    for last in range(5):
        come = set()

        def program(comm, last=last, come=come):
            for turn in range(3):
                for _ in range(100 if comm.rank == last else 0):
                    comm.transport.block(lambda: 0.0, "its next turn")
                come.add((turn, comm.rank))
                barrier(comm)
                assert {(turn, rank) for rank in range(comm.size)} <= come

        virtual.run(5, program)


@pytest.mark.mpi
def test_nobody_leaves_a_barrier_of_real_ranks_before_the_last_has_come(link):
    shared = link.share(8)
    counts = [segment.view(np.int64) for segment in shared.segments]
    for turn in range(1, 60):
        if turn % 20 == link.rank:
            time.sleep(0.005)
        counts[link.rank][0] = turn
        barrier(link)
        assert all(turn <= count[0] <= turn + 1 for count in counts)
    link.Barrier()


@pytest.mark.mpi
@pytest.mark.parametrize("layout", REAL)
def test_max_and_sum_of_the_same_call_in_turns(link, layout):
    """Scratch memory of one call must not be seen by the next."""
    comm = placed(link, layout)
    for turn in range(20):
        n = (1000, 3, 70)[turn % 3]
        check_reduce_scatter_once(comm, n, (SUM, MAX)[turn % 2])


def check_reduce_scatter_once(comm, n, op):
    begin, end = block_bounds(n, comm.size, comm.rank)
    block = np.empty(end - begin)
    reduce_scatter(comm, given(comm.rank, n, "d"), block, op)
    np.testing.assert_array_equal(block, fold(comm.size, n, "d", op)[begin:end])
