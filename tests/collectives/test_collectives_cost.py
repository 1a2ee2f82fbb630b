"""What a call sends is what its file says, to the byte where blocks are equal; each call leaves one span."""

from __future__ import annotations

import math

import numpy as np
import pytest
from harness.reductions import LAYOUTS, placed

from mpiddl import collectives
from mpiddl.collectives import TwoStep, allreduce, barrier, broadcast, iallreduce, reduce, reduce_scatter
from mpiddl.node.topology import Topology
from mpiddl.progress.started import Queue, run
from mpiddl.transport import virtual
from mpiddl.transport.base import IN_PLACE

pytestmark = pytest.mark.no_mpi

SIZES = [1, 2, 3, 4, 7, 8]
EACH = 24
"""Elements a rank: blocks are equal, and slices of blocks, too."""


def sent(comm, call):
    """Bytes and messages that one call counts, and that it left one span in order; an earlier one has set it up."""
    call()
    bytes_before, messages_before, spans = comm.meter.bytes, comm.meter.messages, len(comm.meter.spans)
    call()
    (span,) = comm.meter.spans[spans:]
    assert span.arrived <= span.entered <= span.left
    return comm.meter.bytes - bytes_before, comm.meter.messages - messages_before


def of_all(size, call, nodes=None):
    """The same for each rank; `call(comm, array)` with one array of EACH elements a rank."""
    return virtual.run(size, lambda comm: sent(comm, lambda: call(comm, np.ones(EACH * size))), nodes)


@pytest.mark.parametrize("size", SIZES)
def test_ring(size):
    found = of_all(size, lambda comm, data: allreduce(comm, IN_PLACE, data, algorithm="ring"))
    assert found == [(2 * (size - 1) * EACH * 8, 2 * (size - 1))] * size


@pytest.mark.parametrize("size", SIZES)
def test_halves_of_the_ring(size):
    half = [((size - 1) * EACH * 8, size - 1)] * size
    assert of_all(size, lambda comm, data: reduce_scatter(comm, data, np.empty(EACH))) == half
    assert of_all(size, lambda comm, data: collectives.allgather(comm, np.ones(EACH), data)) == half


@pytest.mark.parametrize("size", SIZES)
def test_doubling(size):
    found = of_all(size, lambda comm, data: allreduce(comm, IN_PLACE, data, algorithm="doubling"))
    core = 1 << (size.bit_length() - 1)
    rounds, odd = core.bit_length() - 1, size - core
    wanted = [1 if rank < 2 * odd and rank % 2 else rounds + (rank < 2 * odd) for rank in range(size)]
    assert found == [(messages * EACH * 8 * size, messages) for messages in wanted]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("leader", [False, True])
def test_two_step_sends_the_least_a_node_can(layout, leader):
    homes = LAYOUTS[layout]
    topology = Topology(homes)
    nodes, streams = len(topology.nodes), 1 if leader else topology.least
    n = nodes * streams * 6

    def program(comm):
        plan = TwoStep(comm, n, "d", leader=leader)
        found = [sent(comm, plan) for _ in range(2)]
        far = np.ones(n)
        name = "two-step-leader" if leader else "two-step"
        return [*found, sent(comm, lambda: allreduce(comm, IN_PLACE, far, algorithm=name))]

    found = virtual.run(len(homes), program, homes)
    for call in range(3 if nodes > 1 else 2):
        for node in topology.nodes:
            assert sum(found[rank][call][0] for rank in node) == 2 * (nodes - 1) * n * 8 // nodes
            talking = [topology.local(rank) for rank in node if found[rank][call][1]]
            assert talking == (list(range(streams)) if nodes > 1 else [])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("root", [0, -1])
def test_broadcast(size, root):
    root, whole, block = root % size, EACH * 8 * size, EACH * 8
    chain = of_all(size, lambda comm, data: broadcast(comm, data, root, algorithm="chain"))
    assert chain == [(0, 0) if (rank + 1) % size == root else (whole, 1) for rank in range(size)]
    scatter = of_all(size, lambda comm, data: broadcast(comm, data, root, algorithm="scatter"))
    assert [nbytes for nbytes, _ in scatter] == [(size - 1) * block * (1 + (rank == root)) for rank in range(size)]
    tree = of_all(size, lambda comm, data: broadcast(comm, data, root, algorithm="binomial"))
    assert sum(nbytes for nbytes, _ in tree) == (size - 1) * whole
    assert tree[root][1] == math.ceil(math.log2(size)) == max(messages for _, messages in tree)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("root", [0, -1])
def test_reduce(size, root):
    root, whole, block = root % size, EACH * 8 * size, EACH * 8
    tree = of_all(size, lambda comm, data: reduce(comm, data, data.copy(), root=root, algorithm="binomial"))
    assert tree == [(0, 0) if rank == root else (whole, 1) for rank in range(size)]
    scatter = of_all(size, lambda comm, data: reduce(comm, data, data.copy(), root=root, algorithm="scatter"))
    assert [nbytes for nbytes, _ in scatter] == [(size - 1) * block + block * (rank != root) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_barrier(size):
    assert of_all(size, lambda comm, data: barrier(comm)) == [(0, math.ceil(math.log2(size)))] * size


@pytest.mark.mpi
@pytest.mark.parametrize("layout", ["one", "own"])
def test_real_ranks_count_the_same(link, layout):
    comm, size = placed(link, layout), link.size
    data = np.ones(EACH * size)
    assert sent(comm, lambda: allreduce(comm, IN_PLACE, data, algorithm="ring"))[0] == 2 * (size - 1) * EACH * 8
    plan = TwoStep(comm, EACH * size, "d")
    assert sent(comm, plan)[0] == (2 * (size - 1) * EACH * 8 if layout == "own" else 0)
    assert sent(comm, lambda: allreduce(comm, IN_PLACE, data, algorithm="two-step"))[0] <= 2 * (size - 1) * EACH * 8


@pytest.mark.mpi
def test_bytes_of_calls_under_way_together_are_counted_once(link):
    arrays, spans = [np.ones(EACH * link.size) for _ in range(3)], len(link.meter.spans)
    before = link.meter.bytes
    requests = [iallreduce(link, IN_PLACE, data, algorithm="ring") for data in arrays]
    for request in requests[::-1]:
        request.Wait()
        request.Wait()
        assert request.Test()
    assert link.meter.bytes - before == 3 * 2 * (link.size - 1) * EACH * 8
    assert len(link.meter.spans) - spans == 3


def test_many_that_wait_for_each_other_are_asked_once_each():
    asked, there = [], []

    class Reply:
        def Test(self):
            asked.append(self)
            return bool(there)

    def program(comm):
        queue = Queue()
        started = [run(comm, (), iter([Reply()]), False, queue) for _ in range(40)]
        asked.clear()
        assert not started[-1].Test() and len(asked) <= len(started)
        there.append(True)
        assert started[-1].Test() and all(each.over for each in started)

    virtual.run(1, program)


@pytest.mark.parametrize(("library", "ring", "chain"), [("Open MPI v5.0.11", 30, 18), ("MPICH Version: 5.0.2", 12, 8)])
def test_segments_are_as_long_as_the_library_likes_them(library, ring, chain, monkeypatch):
    monkeypatch.setattr(virtual.VirtualTransport, "library", lambda _: library)
    data = np.zeros(1 << 18, "f")

    def program(comm):
        around = sent(comm, lambda: allreduce(comm, IN_PLACE, data.copy(), algorithm="ring"))
        return around[1], sent(comm, lambda: broadcast(comm, data.copy(), algorithm="chain"))[1]

    assert virtual.run(4, program) == [(ring, chain)] * 3 + [(ring, 0)]
