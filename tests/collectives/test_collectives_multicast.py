"""Broadcast and all-gather over multicast, on virtual hosts and on ranks of this machine: results, bytes, and what they fall
back to."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from harness.reductions import LAYOUTS, given, lengths, placed
from harness.tiers import only

from mpiddl.collectives import allgather, broadcast, iallgather, iallreduce, ibroadcast
from mpiddl.collectives import multicast as hosts
from mpiddl.errors import CommError, SharedMemoryError, TransportError
from mpiddl.layout import block_bounds
from mpiddl.node.arena import Arena
from mpiddl.node.topology import Topology, neighbours
from mpiddl.transport import virtual
from mpiddl.transport.base import REDUCED

pytestmark = pytest.mark.no_mpi

SEVERAL = [name for name, nodes in LAYOUTS.items() if len(set(nodes)) > 1]
ON = only(["1+1", "2+1", "2+2 in turn", "1+4 mixed", "1+1+1+1+1+1"], SEVERAL)
WIRE = virtual.Wire(1e-4, 25e6)


def check_broadcast(comm, n, dtype, roots=None, **options):
    for root in range(comm.size) if roots is None else roots:
        buf = given(comm.rank + 1, n, dtype)
        broadcast(comm, buf, root, algorithm="multicast", **options)
        np.testing.assert_array_equal(buf, given(root + 1, n, dtype))


def check_allgather(comm, n, dtype, **options):
    begin, end = block_bounds(n, comm.size, comm.rank)
    whole, result = given(77, n, dtype), np.zeros(n, dtype)
    allgather(comm, whole[begin:end].copy(), result, algorithm="multicast", **options)
    np.testing.assert_array_equal(result, whole)


@pytest.fixture
def small(monkeypatch):
    """Pieces of 64 bytes: nine of them are more than there are slots."""
    monkeypatch.setattr(hosts, "PIECE_BYTES", 64)


@pytest.mark.parametrize("layout", ON)
def test_every_length_and_root(layout):
    def program(comm):
        for n in lengths(comm.size):
            check_broadcast(comm, n, "l")
            check_allgather(comm, n, "l")
        check_broadcast(comm, 7, "l", checked=True)
        check_allgather(comm, 7, "l", checked=True)

    virtual.run(len(LAYOUTS[layout]), program, LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["1+1", "2+2 in turn", "2+3"])
@pytest.mark.parametrize("wire", [None, WIRE])
def test_many_pieces(layout, wire, small):
    size = len(LAYOUTS[layout])

    def program(comm):
        for pieces in (1, 2, 4, 5, 9):
            for n in (8 * pieces - 1, 8 * pieces, 8 * pieces + 1):
                check_broadcast(comm, n, "d")
                check_allgather(comm, n * size + 1, "d")

    virtual.run(size, program, LAYOUTS[layout], wire)


def test_long_arrays():
    """More than the slots hold, in pieces as they are."""
    def program(comm):
        check_broadcast(comm, 1_500_001, "b", [0, 3])
        check_allgather(comm, 3_000_001, "b")

    virtual.run(4, program, [0, 0, 1, 2], WIRE)


@pytest.mark.parametrize("dtype", REDUCED)
def test_every_dtype(dtype, small):
    def program(comm):
        check_broadcast(comm, 50, dtype, [1])
        check_allgather(comm, 50, dtype)

    virtual.run(3, program, [0, 0, 1])


@pytest.mark.parametrize("layout", ["1+1", "2+1", "3+3 in turn"])
def test_ranks_that_compute_in_between(layout, small):
    """Each as long as it likes: the others wait for it, however long that is."""
    size = len(LAYOUTS[layout])

    def program(comm):
        draws = np.random.default_rng(comm.rank)
        for _ in range(6):
            comm.compute(draws.exponential(0.5))
            check_broadcast(comm, 70, "l", [0, size - 1])
            comm.compute(draws.exponential(0.5))
            check_allgather(comm, 30 * size, "l")

    virtual.run(size, program, LAYOUTS[layout], WIRE)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_it_takes_the_time_of_one_copy(size):
    nbytes = 4 << 20

    def program(comm):
        buf, took = np.zeros(nbytes, "b"), []
        blocks = block_bounds(nbytes, comm.size, comm.rank)
        for call in (lambda: broadcast(comm, buf, algorithm="multicast"),
                     lambda: allgather(comm, buf[slice(*blocks)].copy(), buf, algorithm="multicast")):
            call()  # makes the channel
            comm.Barrier()
            before = comm.clock
            call()
            took.append(comm.clock - before)
        return took

    copy = 1472 / 1448 * nbytes / WIRE.rate
    for spread, gathered in virtual.run(size, program, range(size), WIRE):
        assert copy <= 1.001 * spread < 1.05 * copy
        assert (size - 1) / size * copy <= 1.001 * gathered < 1.15 * copy


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("layout", ["1+1", "2+1", "3+3 in turn"])
def test_several_under_way(layout, order, small):
    """From one root and from two, all-gathers, and an all-reduce; half of the ranks wait for the last one first."""
    nodes = LAYOUTS[layout]

    def program(comm):
        started = []
        for turn, root in enumerate((0, 0, comm.size - 1)):
            buf = given(root + turn if comm.rank == root else 99, 100, "d")
            started.append((ibroadcast(comm, buf, root, algorithm="multicast"), buf, given(root + turn, 100, "d")))
            whole, result = given(turn, 90, "d"), np.zeros(90)
            own = whole[slice(*block_bounds(90, comm.size, comm.rank))].copy()
            started.append((iallgather(comm, own, result, algorithm="multicast"), result, whole))
        total = np.empty(5)
        started.append((iallreduce(comm, np.ones(5), total), total, np.full(5, comm.size)))
        for request, found, wanted in started[:: order if comm.rank % 2 else 1]:
            request.Wait()
            np.testing.assert_array_equal(found, wanted)

    virtual.run(len(nodes), program, nodes, WIRE)
    virtual.run(len(nodes), program, nodes)


@pytest.mark.parametrize("layout", ["1+1", "2+1", "2+3", "3+3 in turn"])
def test_bytes_are_counted_once(layout):
    """By the leader of the host that sends: a broadcast those of the root, an all-gather those of its ranks."""
    nodes, n = LAYOUTS[layout], 3000 * len(LAYOUTS[layout])
    topology = Topology(nodes)

    def program(comm):
        check_broadcast(comm, n, "b", [0])
        check_allgather(comm, n, "b")
        counts = []
        for call in (lambda: check_broadcast(comm, n, "b", [len(nodes) - 1]), lambda: check_allgather(comm, n, "b")):
            before = comm.meter.bytes
            call()
            counts.append(comm.meter.bytes - before)
        return counts

    found = virtual.run(len(nodes), program, nodes)
    first = topology.nodes[topology.node(len(nodes) - 1)][0]
    assert [counts[0] for counts in found] == [n if rank == first else 0 for rank in range(len(nodes))]
    assert [counts[1] for counts in found] == [
        3000 * len(topology.nodes[topology.node(rank)]) if rank in topology.leaders else 0 for rank in range(len(nodes))]


def silent(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()


def test_on_one_host_it_is_another_algorithm():
    def program(comm):
        silent(lambda: check_broadcast(comm, 1000, "l"))
        silent(lambda: check_allgather(comm, 1000, "l"))
        assert comm.meter.bytes > 0 or comm.size == 1

    for size in (1, 3):
        virtual.run(size, program)


def test_where_multicast_does_not_work_that_is_said_once(monkeypatch):
    def fails(comm, joined, interface):
        raise TransportError("multicast: no such network")

    monkeypatch.setattr(hosts, "connect", fails)

    def program(comm):
        for _ in range(2):
            check_broadcast(comm, 1000, "l", [0, 2])
            check_allgather(comm, 1000, "l")
        return comm.meter.bytes

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        virtual.run(4, program, [0, 0, 1, 1])
    words = "multicast: no such network; messages go through virtual ranks in one process"
    assert [str(each.message) for each in told] == [words]


def test_a_host_without_room_for_the_memory(monkeypatch):
    """All ranks raise, and can go on with another algorithm."""
    common, full = Arena.common, []

    def limited(arena, *arguments):
        if arena._local in full:
            raise SharedMemoryError("shared memory: got no room")
        return common(arena, *arguments)

    monkeypatch.setattr(Arena, "common", limited)

    def program(comm):
        if comm.rank > 1:
            full.append(neighbours(comm).local)
        else:
            neighbours(comm)
        with pytest.raises(SharedMemoryError, match=r"got no room \(on ranks 2, 3 of 4\)"):
            check_broadcast(comm, 1000, "l")
        buf = np.full(5, comm.rank)
        broadcast(comm, buf, 2, algorithm="chain")
        assert (buf == 2).all()

    virtual.run(4, program, [0, 0, 1, 1])


def test_a_communicator_that_is_freed_meanwhile(small):
    def program(comm):
        own = comm.Dup()
        buf = np.zeros(100)
        broadcast(own, buf, 1, algorithm="multicast")
        request = ibroadcast(own, buf, 1, algorithm="multicast") if comm.rank != 1 else None
        own.Free()
        if request is not None:
            with pytest.raises(CommError, match="freed while it was under way"):
                request.Wait()
        check_broadcast(comm, 10, "l")

    virtual.run(3, program, [0, 1, 2])


# Ranks of this machine, which believe to be on several hosts: over the loopback interface

@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", ["own", "halves", "in turn", "uneven"])
def test_real_ranks(link, layout):
    comm = placed(link, layout)
    for n in (*lengths(comm.size), 400_001):
        check_broadcast(comm, n, "f", [0, comm.size - 1])
        check_allgather(comm, n, "f")
    check_broadcast(comm, 5000, "d")


@pytest.mark.mpi(min_size=2)
def test_real_ranks_with_several_under_way(link, small):
    comm = placed(link, "own")
    for turn in range(10):
        buf = given(turn if comm.rank == 0 else 99, 200, "d")
        whole, result = given(turn, 300, "d"), np.zeros(300)
        own = whole[slice(*block_bounds(300, comm.size, comm.rank))].copy()
        requests = [ibroadcast(comm, buf, algorithm="multicast"), iallgather(comm, own, result, algorithm="multicast")]
        for request in requests[:: -1 if comm.rank % 2 else 1]:
            request.Wait()
        np.testing.assert_array_equal(buf, given(turn, 200, "d"))
        np.testing.assert_array_equal(result, whole)


@pytest.mark.mpi(min_size=2)
@pytest.mark.limit(100)
def test_an_acknowledgement_that_gets_lost_before_ranks_wait_elsewhere(link, monkeypatch):
    """Rank 0 has not got it, asks, and is answered while the others wait for it in the MPI library."""
    comm = placed(link, "own")
    check_broadcast(comm, 1000, "f", [0])
    if comm.rank:
        medium = hosts.hosts(comm).link.channel.medium
        monkeypatch.setattr(medium, "send", lambda *_: True)
    check_broadcast(comm, 1000, "f", [0])
    monkeypatch.undo()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_real_ranks_free_and_begin_anew(link):
    for _ in range(3):
        comm = placed(link, "own")
        check_broadcast(comm, 100_000, "f", [comm.size - 1])
        comm.Free()
