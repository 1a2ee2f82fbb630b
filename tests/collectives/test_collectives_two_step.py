"""The reduction that is set up once: what its input and result are, in both forms, on any nodes, until it is freed."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
from harness import queue_transport
from harness.reductions import LAYOUTS, OPS, REAL, fold, given, placed, rough

from mpiddl.collectives import TreeSum, TwoStep, allreduce
from mpiddl.errors import CommError, MismatchError, ShapeError, UsageError
from mpiddl.node.topology import neighbours
from mpiddl.transport import shared_memory as shared
from mpiddl.transport import virtual
from mpiddl.transport.base import MAX, PROD, SUM

pytestmark = pytest.mark.no_mpi

FORMS = {"slices": False, "leader": True}
SIZES = [0, 1, 3, 15, 16, 1000, 40_001]


def check_plan(comm, form, dtype, sizes=SIZES):
    for n in sizes:
        for op in OPS:
            plan = TwoStep(comm, n, dtype, op, leader=FORMS[form], segment_bytes=512)
            assert plan.input.shape == plan.result.shape == (n,)
            assert not plan.input.any() and not plan.result.any()
            for turn in (1, 2, 3):
                plan.input[:] = given(comm.rank, n, dtype) * np.dtype(dtype).type(turn)
                found = plan()
                plan.input[:] = 99  # free as soon as the call is over, for all ranks
                scale = turn**comm.size if op is PROD else turn
                np.testing.assert_array_equal(found, fold(comm.size, n, dtype, op) * np.dtype(dtype).type(scale))
                assert found is plan.result
            plan.Free()
            plan.Free()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_input_and_result(layout, form):
    nodes = LAYOUTS[layout]
    virtual.run(len(nodes), lambda comm: check_plan(comm, form, "l", [0, 1, comm.size, 300]), nodes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_input_and_result_on_a_transport_that_only_moves_messages(size, form):
    queue_transport.run(size, lambda comm: check_plan(comm, form, "l", [0, 1, size, 300]))


@pytest.mark.mpi
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", REAL)
def test_input_and_result_on_real_ranks(link, layout, form):
    comm = placed(link, layout)
    check_plan(comm, form, "f", [1, 1000])
    check_plan(comm, form, "d", [16, 4001])


@pytest.mark.mpi
@pytest.mark.parametrize("layout", REAL)
def test_ranks_of_a_node_have_one_result_between_them(link, layout):
    comm = placed(link, layout)
    local = neighbours(comm).local
    plan = TwoStep(comm, 10, "d", MAX)
    plan()
    local.Barrier()
    if local.rank == local.size - 1:
        plan._result[3] = comm.rank + 100.0  # what one writes against the rule, all of the node see
    local.Barrier()
    last = local.allgather(comm.rank)[-1]
    assert plan.result[3] == last + 100.0
    with pytest.raises(ValueError, match="read-only"):
        plan.result[0] = 1
    comm.Barrier()


@pytest.mark.mpi
@pytest.mark.parametrize("form", FORMS)
def test_the_result_stays_until_this_rank_calls_again(link, form):
    comm = placed(link, "halves")
    plan = TwoStep(comm, 500, "d", leader=FORMS[form])
    for turn in range(40):
        plan.input[:] = turn + comm.rank
        found = plan()
        plan.input[:] = -1
        if turn % 10 == comm.rank:
            time.sleep(0.005)  # the others are at the next call
        assert (found == comm.size * turn + comm.size * (comm.size - 1) / 2).all()


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["f", "d"])
@pytest.mark.parametrize("n", [1, 31, 3001])
def test_the_fused_kernel_and_the_general_path_give_the_same_bits(link, dtype, n):
    plan = TwoStep(link, n, dtype)
    plan.input[:] = rough(link.rank, n)
    fused = plan().copy()
    assert bool(plan._at_once) == (link.size > 1)
    plan._at_once = ()
    assert plan().tobytes() == fused.tobytes()
    far, total = rough(link.rank, n).astype(dtype), np.empty(n, dtype)
    allreduce(link, far, total, algorithm="two-step")
    assert total.tobytes() == fused.tobytes()
    link.Barrier()


@pytest.mark.mpi
def test_long_results_that_are_written_past_the_caches(link):
    n = (9 << 20) // 4 + 5
    plan = TwoStep(link, n, "f")
    plan.input[:] = np.arange(n) % 1000 + link.rank
    wanted = (np.arange(n) % 1000 * link.size + link.size * (link.size - 1) / 2).astype("f")
    np.testing.assert_array_equal(plan(), wanted)
    plan.Free()


@pytest.mark.mpi
@pytest.mark.parametrize("layout", REAL)
def test_plans_are_freed_with_their_communicator(link, layout):
    comm = placed(link, layout)
    plans = [TwoStep(comm, 100, dtype) for dtype in "fdl"]
    for plan in plans:
        plan()
    comm.Free()
    for plan in plans:
        with pytest.raises(CommError, match="comm: got a freed communicator"):
            plan()
        with pytest.raises(CommError, match="freed"):
            plan.start()
        plan.Free()
    with pytest.raises(CommError, match="freed"):
        TwoStep(comm, 3, "f")


@pytest.mark.mpi
def test_a_plan_may_be_freed_and_made_again_many_times(link):
    for turn in range(30):
        plan = TwoStep(placed(link, "own") if turn % 10 == 0 else link, 50, "d")
        plan.input[:] = 1
        assert (plan() == link.size).all()
        plan.Free()


@pytest.mark.mpi(min_size=2)
def test_too_little_room_on_one_node_is_told_on_every_rank(link, monkeypatch):
    comm = placed(link, "halves")
    neighbours(comm)
    found, real = os.statvfs("/dev/shm"), os.statvfs
    full = os.statvfs_result((*found[:4], 1, *found[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda path: full if comm.rank == comm.size - 1 else real(path))
    with pytest.raises(CommError, match=r"shared memory: .* MB needed for .* free; enlarge it"):
        TwoStep(comm, 100_000, "d")
    with pytest.raises(CommError, match=r"shared memory: .* MB needed for"):
        allreduce(comm, np.ones(100_000), np.ones(100_000), algorithm="two-step-leader")
    monkeypatch.undo()
    assert (TwoStep(comm, 100_000, "d")() == 0).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("plan", [TwoStep, TreeSum])
def test_a_plan_that_fails_half_way_keeps_no_memory(link, monkeypatch, plan):
    """Its input had been made when there was no room for its result."""

    def taken():
        parts = Path("/proc/self/smaps").read_text().split(shared.PREFIX)[1:]
        return sum(int(re.search(r"^Rss: +(\d+)", part, re.MULTILINE)[1]) for part in parts)

    neighbours(link)
    before, calls, real = taken(), [], shared._free
    monkeypatch.setattr(shared, "_free", lambda: 0 if calls or calls.append(1) else real())
    with pytest.raises(CommError, match="MB needed"):
        plan(link, 1 << 20, "d")
    assert calls and taken() == before
    assert not any(not memory.freed for memory in neighbours(link).local._owned if isinstance(memory, shared.SharedMemory))
    monkeypatch.undo()
    assert (plan(link, 1 << 20, "d")() == 0).all()


def check_mistakes(comm):
    for dtype in ("?", "e", ">f8", "O"):
        with pytest.raises(UsageError, match="dtype: got dtype"):
            TwoStep(comm, 3, dtype)
    with pytest.raises(UsageError, match="op: got MAX for complex128"):
        TwoStep(comm, 3, "D", MAX)
    with pytest.raises(UsageError, match="op: got 'sum'"):
        TwoStep(comm, 3, "d", "sum")
    with pytest.raises(ShapeError, match="size: got -1"):
        TwoStep(comm, -1, "d")
    last = comm.rank == comm.size - 1
    for odd, even in (((4, "d"), (3, "d")), ((3, "f"), (3, "d")), ((3, "d", MAX), (3, "d", SUM))):
        with pytest.raises(MismatchError, match=r"TwoStep: .* expected the same value on every rank"):
            TwoStep(comm, *(odd if last else even))
    assert TwoStep(comm, 3, "d")().shape == (3,)


@pytest.mark.parametrize("layout", ["2", "2+1", "1+4 mixed"])
def test_mistakes_are_told_on_every_rank(layout):
    virtual.run(len(LAYOUTS[layout]), check_mistakes, LAYOUTS[layout])


@pytest.mark.mpi(min_size=2)
def test_mistakes_are_told_on_every_real_rank(link):
    check_mistakes(link)
