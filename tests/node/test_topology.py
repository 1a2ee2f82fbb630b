"""Where the ranks are: nodes, rings and cross communicators, for any placement."""

from __future__ import annotations

import numpy as np
import pytest
from harness.reductions import REAL, placed, real_nodes
from hypothesis import given, strategies

from mpiddl.node.topology import Topology, neighbours
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

HOMES = strategies.lists(strategies.integers(-3, 6), min_size=1, max_size=20)


@given(HOMES)
def test_every_rank_is_on_one_node(homes):
    topology = Topology(homes)
    assert topology.size == len(homes)
    assert sorted(rank for node in topology.nodes for rank in node) == list(range(len(homes)))
    for rank, home in enumerate(homes):
        node = topology.nodes[topology.node(rank)]
        assert node == tuple(other for other, its in enumerate(homes) if its == home)
        assert node[topology.local(rank)] == rank
    assert topology.leaders == tuple(sorted(min(node) for node in topology.nodes))


@given(HOMES)
def test_a_cross_communicator_has_one_rank_of_every_node_that_has_as_many(homes):
    topology = Topology(homes)
    assert topology.across(0) == topology.leaders
    for local in range(len(homes)):
        across = topology.across(local)
        assert [topology.local(rank) for rank in across] == [local] * len(across)
        numbers = [topology.node(rank) for rank in across]
        assert numbers == [number for number, node in enumerate(topology.nodes) if len(node) > local]
        assert (len(across) == len(topology.nodes)) == (local < topology.least)


@given(HOMES)
def test_the_ring_leaves_each_node_once(homes):
    topology = Topology(homes)
    ring = topology.ring
    assert sorted(ring) == list(range(len(homes)))
    after = (*ring[1:], ring[0])
    left = [homes[rank] for rank, following in zip(ring, after, strict=True) if homes[rank] != homes[following]]
    assert sorted(left) == (sorted(set(homes)) if len(set(homes)) > 1 else [])


@pytest.mark.parametrize(
    ("homes", "words"),
    [([3], "1 node x 1 rank"), ([0, 0], "1 node x 2 ranks"), ([0, 1], "2 nodes x 1 rank"),
     ([0, 1, 1], "3 ranks on 2 nodes (1+2)"), ([5, 4, 5, 4], "2 nodes x 2 ranks")],
)  # fmt: skip
def test_it_says_what_it_is(homes, words):
    assert str(Topology(homes)) == words


def check_neighbours(comm, homes):
    near = neighbours(comm)
    topology = Topology(homes)
    assert neighbours(comm) is near
    assert near.topology.nodes == topology.nodes
    groups = (
        (near.local, topology.nodes[topology.node(comm.rank)]),
        (near.across, topology.across(topology.local(comm.rank))),
        (near.ring, topology.ring),
    )
    for part, members in groups:
        assert tuple(part.allgather(comm.rank)) == members
        assert members[part.rank] == comm.rank
        total = np.array([float(comm.rank)])
        part.Allreduce(total.copy(), total)
        assert total == sum(members)


@pytest.mark.parametrize("homes", [[0], [0, 0, 0], [0, 1, 2], [5, 4, 5, 4], [0, 1, 1, 0, 2, 1], [1, 0] * 5])
def test_neighbours_of_virtual_ranks(homes):
    virtual.run(len(homes), lambda comm: check_neighbours(comm, homes), homes)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("layout", REAL)
def test_neighbours_of_real_ranks(link, layout):
    comm = placed(link, layout)
    check_neighbours(comm, real_nodes(link.size)[layout])
    near = neighbours(comm)
    comm.Free()
    assert near.local.freed and near.across.freed and near.ring.freed


@pytest.mark.mpi(min_size=1)
def test_one_machine_is_one_node(link):
    assert link.nodes() == [0] * link.size
