"""The tree all-reduce equals a serial sum in the same tree to the bit, wherever the ranks are and whatever way it takes."""

from __future__ import annotations

import numpy as np
import pytest
from harness import queue_transport
from harness.reductions import LAYOUTS, REAL, given, placed, rough, serial

from mpiddl.collectives import TreeSum, allreduce
from mpiddl.collectives.allreduce_tree import add_up, branches, exchange, kept_plan, levels
from mpiddl.collectives.plan import staged_steps
from mpiddl.collectives.wire import wire
from mpiddl.errors import CommError, MismatchError, UsageError
from mpiddl.node.topology import Topology
from mpiddl.transport import virtual
from mpiddl.transport.base import IN_PLACE, REDUCED, SUM

pytestmark = pytest.mark.no_mpi

LONG = 120_001
SEGMENTED = 3 * 4 * 33_000
"""So that the slice of one of three ranks is longer than a segment."""

PLACES = {name: LAYOUTS[name] for name in ("1", "2", "1+1", "3", "2+1", "5", "2+2 in turn", "1+4 mixed", "4+4+4")} | {
    "2+2": [0, 0, 1, 1],
    "2+2+2+1": [0, 0, 1, 1, 2, 2, 3],
    "4+4+2": [0] * 4 + [1] * 4 + [2] * 2,
}


def roughly(rank, n, dtype):
    """Numbers whose sum depends on the order, of any dtype."""
    kind = np.dtype(dtype)
    if kind.kind in "bhilqBHILQui":
        return given(rank, n, dtype)
    values = np.resize(rough(rank), n).astype(kind)
    return values * kind.type(1 + 2j) if kind.kind == "c" else values


def lengths(size):
    return dict.fromkeys([0, 1, size - 1, size, size + 1, 1000])


def same(found, wanted):
    """To the bit, the signs of zeros included; long doubles have bytes that belong to no number."""
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype.char in "gG" or found.tobytes() == wanted.tobytes()


def check(comm, dtype, sizes, plans=True):
    for n in sizes:
        mine, total = roughly(comm.rank, n, dtype), np.full(n, 99).astype(dtype)
        wanted = serial([roughly(rank, n, dtype) for rank in range(comm.size)])
        allreduce(comm, mine, total, algorithm="tree")
        same(total, wanted)
        if plans:
            plan = TreeSum(comm, n, dtype)
            for _ in range(2):
                plan.input[:] = mine
                same(plan(), wanted)
            plan.Free()
        allreduce(comm, IN_PLACE, mine, algorithm="tree")
        same(mine, wanted)


@pytest.mark.parametrize("layout", PLACES)
def test_the_serial_tree_on_any_nodes(layout):
    nodes = PLACES[layout]
    virtual.run(len(nodes), lambda comm: check(comm, "f", [*lengths(comm.size), LONG]), nodes)


@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("apart", [False, True])
def test_the_serial_tree_of_every_dtype(size, apart):
    nodes = list(range(size)) if apart else None
    virtual.run(size, lambda comm: [check(comm, dtype, [1, size + 1, 100], plans=False) for dtype in REDUCED], nodes)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_serial_tree_on_a_transport_that_only_moves_messages(size):
    queue_transport.run(size, lambda comm: check(comm, "f", lengths(size)))


@pytest.mark.mpi
@pytest.mark.parametrize("layout", REAL)
def test_the_serial_tree_on_real_ranks(link, layout):
    for dtype in "fd":
        check(placed(link, layout), dtype, [*lengths(link.size), SEGMENTED])


def test_the_order_of_adding_shows():
    """Else nothing here could fail: the sum of five rough parts in rank order has other bits."""
    parts = [rough(rank) for rank in range(5)]
    in_order = parts[0] + parts[1] + parts[2] + parts[3] + parts[4]
    assert 0.02 < np.mean(in_order != serial(parts)) < 0.98


@pytest.mark.parametrize("held", [1, 2, 4, 8])
def test_the_bits_do_not_depend_on_how_many_parts_a_rank_holds(held):
    """The law that reproducible training rests on."""
    parts = [rough(number) for number in range(16)]

    def program(comm):
        total = np.empty_like(parts[0])
        allreduce(comm, serial(parts[held * comm.rank : held * (comm.rank + 1)]), total, algorithm="tree")
        return total.tobytes()

    assert set(virtual.run(16 // held, program)) == {serial(parts).tobytes()}


@pytest.mark.parametrize("count", range(1, 18))
def test_parts_in_memory(count):
    parts = [rough(number, 300) for number in range(count)]
    kept = [part.copy() for part in parts]
    total = add_up(SUM, parts, np.empty(300, np.float32), np.empty((levels(count), 300), np.float32))
    same(total, serial(kept))
    same(np.array(parts), np.array(kept))


def check_small(comm):
    for n in (1, comm.size + 1, 247):
        mine, total = roughly(comm.rank, n, "d"), np.empty(n)
        wanted = serial([roughly(rank, n, "d") for rank in range(comm.size)])
        plan = kept_plan(comm, 200, total.dtype, SUM, most_bytes=200)
        ways = [exchange(wire(comm), lambda b, e, mine=mine: mine[b:e], total, SUM, segment_bytes=64)] if comm.size > 1 else []
        for steps in [*ways, *([staged_steps(plan, mine, total)] if plan else [])]:
            total[:] = 0
            for request in steps:
                request.Wait()
            same(total, wanted)


@pytest.mark.parametrize("layout", PLACES)
def test_many_segments_and_pieces(layout):
    virtual.run(len(PLACES[layout]), check_small, PLACES[layout])


@pytest.mark.mpi
@pytest.mark.parametrize("layout", ["one", "halves"])
def test_many_segments_and_pieces_of_real_ranks(link, layout):
    check_small(placed(link, layout))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_rank_sends_what_the_ring_sends(size):
    def program(comm):
        allreduce(comm, IN_PLACE, np.ones(24 * size), algorithm="tree")  # which sets it up
        before = comm.meter.bytes, comm.meter.messages
        allreduce(comm, IN_PLACE, np.ones(24 * size), algorithm="tree")
        return comm.meter.bytes - before[0], comm.meter.messages - before[1]

    assert virtual.run(size, program, range(size)) == [(2 * (size - 1) * 24 * 8, 2 * (size - 1))] * size
    assert virtual.run(size, program) == [(0, 0)] * size


@pytest.mark.parametrize("homes", [[0, 0, 1, 1], [0, 0, 1, 1, 2, 2], [0] * 4 + [1] * 4])
def test_a_node_that_holds_a_branch_sends_what_a_node_must(homes):
    topology = Topology(homes)
    nodes, n = len(topology.nodes), 24 * topology.least * len(topology.nodes)

    def program(comm):
        plan = TreeSum(comm, n, "d")
        before = comm.meter.bytes
        plan()
        return comm.meter.bytes - before

    sent = virtual.run(len(homes), program, homes)
    assert branches(topology)
    assert {sum(sent[rank] for rank in node) for node in topology.nodes} == {2 * (nodes - 1) * n * 8 // nodes}


@pytest.mark.mpi
def test_mistakes_of_plans(link):
    plan = TreeSum(link, 5, "f")
    with pytest.raises(ValueError, match="read-only"):
        plan.result[0] = 1
    plan.Free()
    with pytest.raises(CommError, match=r"got an object after Free\(\)"):
        plan()
    for size, dtype, message in ((-1, "f", "size: got -1"), (5, "words", "dtype: got 'words'")):
        with pytest.raises(UsageError, match=message):
            TreeSum(link, size, dtype)
    if link.size > 1:
        with pytest.raises(MismatchError, match="size"):
            TreeSum(link, 5 + link.rank, "f")
