"""All-reduces of arrays of which several ranks hold copies: sums, bits, bytes, and who waits for whom."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddl.coding.loads import replicate_and_slice, replicate_and_slice_unicast
from mpiddl.coding.placements import replicated_groups
from mpiddl.collectives.allreduce_replicated_multicast import ReplicatedMulticast
from mpiddl.collectives.allreduce_replicated_ring import ReplicatedRing
from mpiddl.errors import CommError, ShapeError, UsageError
from mpiddl.transport import virtual

KINDS = [ReplicatedMulticast, ReplicatedRing]
CASES = [(n, r) for n in range(1, 7) for r in range(1, n + 1)]
SIZES = [0, 1, 5, 1000, 60_001]
WIRE = virtual.Wire(1e-4, 1e6)
SIZE = 100_000


def arrays_of(groups, size, turn, dtype="float32"):
    return [np.random.default_rng((turn, group)).standard_normal(size).astype(dtype) for group in range(groups)]


def in_order(arrays):
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


def summing(kind, n, r, size, dtype="float32", turns=3):
    """A program that sums several times; returns the bytes that a rank has sent in one turn."""
    owners = replicated_groups(n, r).owners

    def program(comm):
        exchange = kind(comm, owners, size, np.dtype(dtype))
        group = next(number for number, members in enumerate(owners) if comm.rank in members)
        for turn in range(turns):
            arrays = arrays_of(len(owners), size, turn, dtype)
            found = exchange(arrays[group])
            if kind is ReplicatedMulticast:
                assert found.tobytes() == in_order(arrays).tobytes()
            else:
                assert np.allclose(found, in_order(arrays), rtol=1e-5, atol=1e-5)
            assert len(set(comm.allgather(found.tobytes()))) == 1
        assert comm.processes or not exchange.late
        exchange.Free()
        return comm.meter.bytes

    return program


@pytest.mark.no_mpi
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "r"), CASES)
def test_sum_of_the_groups_on_virtual_ranks(kind, n, r):
    for size in SIZES:
        virtual.run(n, summing(kind, n, r, size))


@pytest.mark.no_mpi
@pytest.mark.parametrize(("n", "r"), [(4, 2), (6, 3), (8, 2), (8, 4), (5, 2), (7, 3)])
def test_bytes_are_those_of_the_formulas(n, r):
    size = 840 * 64  # which all numbers of members and groups divide

    def sent(kind):
        owners = replicated_groups(n, r).owners

        def program(comm):
            exchange, before = kind(comm, owners, size, np.dtype("float64")), comm.meter.bytes
            exchange(np.zeros(size))
            return comm.meter.bytes - before

        return virtual.run(n, program)

    assert sum(sent(ReplicatedMulticast)) == 8 * replicate_and_slice(n, r, size).sent
    assert sum(sent(ReplicatedRing)) == 8 * replicate_and_slice_unicast(n, r, size).sent


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("kind", KINDS)
def test_sum_of_the_groups_on_real_ranks(comm, link, kind):
    for r in range(1, comm.size + 1):
        for size in (1, 1000, 60_001):
            summing(kind, comm.size, r, size)(link)


def training(n, r, slow, turns, ahead=4, calc=1.0):
    """Steps in simulated time, one rank of which computes five times as long; who did what, and when."""
    owners = replicated_groups(n, r).owners

    def program(comm):
        exchange = ReplicatedMulticast(comm, owners, SIZE, np.dtype("float32"), ahead)
        group = next(number for number, members in enumerate(owners) if comm.rank in members)
        seconds, skipped, over = calc * (5 if comm.rank == slow else 1), 0, []
        for turn in range(turns):
            arrays, mine = arrays_of(len(owners), SIZE, turn), None
            if exchange.begun(seconds):
                skipped += 1
            else:
                comm.compute(seconds)
                mine = arrays[group]
            assert exchange(mine).tobytes() == in_order(arrays).tobytes()
            over.append(comm.clock)
        return skipped, dict(exchange.late), over

    return virtual.run(n, program, wire=WIRE)


@pytest.mark.no_mpi
@pytest.mark.parametrize(("n", "r"), [(4, 2), (8, 2), (6, 3), (5, 2)])
def test_nobody_waits_for_one_that_is_late(n, r):
    turns = 8
    found = training(n, r, slow=1, turns=turns)
    assert found[1][0] > turns // 3
    assert all(late.keys() <= {1} for rank, (_, late, _) in enumerate(found) if rank != 1)
    assert sum(late.get(1, 0) for _, late, _ in found) > turns // 2
    assert all(skipped == 0 for rank, (skipped, _, _) in enumerate(found) if rank != 1)
    on_time = [over[-1] for rank, (_, _, over) in enumerate(found) if rank != 1]
    nbytes = 4 * SIZE
    limit = turns * (1 + max((n // r - 1) * nbytes, nbytes) / WIRE.rate)
    assert max(on_time) < 1.2 * limit < 5 * turns  # in simulated time, transfers that begin together go one after the other


@pytest.mark.no_mpi
def test_all_on_time_help_nobody():
    for skipped, late, _ in training(6, 2, slow=None, turns=4):
        assert (skipped, late) == (0, {})


@pytest.mark.no_mpi
def test_who_is_alone_in_its_group_is_waited_for():
    found = training(3, 1, slow=1, turns=3)
    assert all((skipped, late) == (0, {}) for skipped, late, _ in found)
    assert min(over[-1] for _, _, over in found) > 15


@pytest.mark.no_mpi
@pytest.mark.parametrize("owners", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2, 3]]], ids=str)
def test_groups_that_are_not_those_of_the_ranks(owners):
    with pytest.raises(UsageError, match="expected each of 3 ranks once"):
        virtual.run(3, lambda comm: ReplicatedMulticast(comm, owners, 8, np.dtype("float32")))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_are_told_of_different_copies(comm, link, kind):
    """When they wait for others next, which is after four rounds at the latest."""
    owners = replicated_groups(comm.size, 2).owners
    exchange = kind(link, owners, 1000, np.dtype("float32"))
    with pytest.raises(CommError, match=r"ranks \d and \d computed different bits for the same gradient"):
        for _ in range(10):
            exchange(np.full(1000, 1.0 + (comm.rank == owners[0][1]), np.float32))
    comm.Barrier()


@pytest.mark.no_mpi
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("array", "words"), [
    (np.zeros(1000, np.int32), "array: got 1000 elements of int32, expected 1000 of float32"),
    (np.zeros(999, np.float32), "array: got 999 elements of float32, expected 1000 of float32"),
    (np.zeros(2000, np.float32)[::2], "array: got an array that is not contiguous"),
    ([0.0] * 1000, "array: got list, expected a numpy array"),
])
def test_arrays_that_were_not_agreed(kind, array, words):
    def program(comm):
        kind(comm, replicated_groups(2, 2).owners, 1000, np.dtype("float32"))(array)

    with pytest.raises(ShapeError, match=words):
        virtual.run(2, program)


@pytest.mark.no_mpi
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_any_shape(kind):
    def program(comm):
        exchange = kind(comm, replicated_groups(4, 2).owners, 12, np.dtype("float32"))
        array = np.arange(12, dtype=np.float32).reshape(3, 4)
        array.flags.writeable = False
        assert (exchange(array) == 2 * array.reshape(-1)).all()
        exchange.Free()

    virtual.run(4, program)
