"""All-reduces of coded vectors of blocks: sums, bits, bytes, and who waits for whom."""

from __future__ import annotations

import numpy as np
import pytest
from harness.tiers import more

from mpiddl.coding.loads import mds
from mpiddl.coding.mds_code import MdsCode
from mpiddl.coding.placements import all_subsets, cyclic, replicated_groups
from mpiddl.collectives.allreduce_mds_multicast import MdsMulticast
from mpiddl.collectives.allreduce_mds_ring import MdsRing
from mpiddl.errors import CommError, ShapeError
from mpiddl.transport import virtual

CASES = [more(n, r, m) if n == 5 and (r, m) != (3, 2) else (n, r, m)
         for n in range(2, 6) for r in range(1, n + 1) for m in range(1, r + 1)]
SIZES = [0, 1, 7, 1000, 30_001]
WIRE = virtual.Wire(1e-4, 1e6)


def arrays_of(blocks, size, turn, dtype="float64"):
    return [np.random.default_rng((turn, block)).standard_normal(size).astype(dtype) for block in range(blocks)]


def summing(code, size, dtype="float64", turns=3):
    """A program that sums several times, and compares the bits of all ranks."""

    def program(comm):
        for kind in [MdsMulticast, MdsRing] if code.slices == code.placement.redundancy else [MdsMulticast]:
            exchange = kind(comm, code, size, np.dtype(dtype))
            for turn in range(turns):
                arrays = arrays_of(len(code.placement.owners), size, turn, dtype)
                for number, block in enumerate(exchange.own):
                    if not exchange.needs():
                        break
                    exchange.bring(number, arrays[block].copy())
                found = exchange()
                wanted, close = sum(arrays), 1e-10 if dtype == "float64" else 1e-3
                assert found.dtype == wanted.dtype
                assert np.allclose(found, wanted, rtol=close, atol=close)
                assert len(set(comm.allgather(found.tobytes()))) == 1
            exchange.Free()

    return program


@pytest.mark.no_mpi
@pytest.mark.parametrize(("n", "r", "m"), CASES)
@pytest.mark.parametrize("placement", [cyclic, all_subsets, replicated_groups])
def test_sum_of_all_blocks_on_virtual_ranks(placement, n, r, m):
    for size in SIZES if placement is cyclic else [7]:
        virtual.run(n, summing(MdsCode(placement(n, r), m), size))
    virtual.run(n, summing(MdsCode(placement(n, r), m), 7, "float32"))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("late", [0, 1])
def test_sum_of_all_blocks_on_real_ranks(comm, link, late):
    for r in {1 + late, comm.size}:
        for size in (1, 60_001):
            summing(MdsCode(cyclic(comm.size, r), r - late), size)(link)


@pytest.mark.no_mpi
@pytest.mark.parametrize(("n", "r", "m"), [(4, 2, 2), (4, 2, 1), (5, 3, 2), (8, 3, 3), (8, 4, 3)])
def test_bytes_are_those_of_the_formulas(n, r, m):
    def program(comm):
        exchange, before = MdsMulticast(comm, MdsCode(cyclic(n, r), m), 1000, np.dtype("float64")), comm.meter.bytes
        for number in range(r):
            exchange.bring(number, np.zeros(1000))
        exchange()
        return comm.meter.bytes - before

    sent = virtual.run(n, program)
    assert sum(sent) == 8 * mds(n, m, 1000, sum(map(bool, sent))).sent
    assert sum(map(bool, sent)) <= n - (r - m)


def training(n, r, m, slow, turns, calc=1.0):
    """Steps in simulated time, one rank of which computes five times as long; blocks computed, who was late, and the end."""
    code = MdsCode(cyclic(n, r), m)

    def program(comm):
        exchange, done, over = MdsMulticast(comm, code, 1000, np.dtype("float64")), 0, 0.0
        for turn in range(turns):
            arrays = arrays_of(n, 1000, turn)
            for number, block in enumerate(exchange.own):
                if not exchange.needs():
                    break
                comm.compute(calc / r * (5 if comm.rank == slow else 1))
                exchange.bring(number, arrays[block])
                done += 1
            assert np.allclose(exchange(), sum(arrays), rtol=1e-10, atol=1e-10)
            over = comm.clock
        exchange.Free()
        return done, dict(exchange.late), over

    return virtual.run(n, program, wire=WIRE)


@pytest.mark.no_mpi
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize(("n", "r", "m"), [(4, 2, 1), (5, 3, 2), (8, 3, 1)])
def test_nobody_waits_for_one_that_is_late(n, r, m, slow):
    turns = 8
    found = training(n, r, m, slow, turns)
    on_time = [over for rank, (_, _, over) in enumerate(found) if rank != slow]
    nbytes = 8 * 1000
    assert max(on_time) < 1.1 * turns * (1 + (n - 1) / m * nbytes / WIRE.rate) < 5 * turns
    assert found[slow][0] < turns * r
    assert found[0][1].get(slow, 0) > 0


@pytest.mark.no_mpi
def test_without_slack_all_are_waited_for():
    found = training(4, 2, 2, slow=1, turns=3)
    assert [done for done, _, _ in found] == [6] * 4
    assert min(over for _, _, over in found) > 15


@pytest.mark.no_mpi
def test_blocks_that_a_late_rank_has_finished_are_used():
    """Two slow ranks own a block together. One alone could be left out; what both have finished first is enough."""
    code, speeds = MdsCode(cyclic(4, 2), 1), [1, 4, 4, 1]

    def program(comm):
        exchange = MdsMulticast(comm, code, 100, np.dtype("float64"))
        for number in range(2):
            if exchange.needs():
                comm.compute(speeds[comm.rank])
                exchange.bring(number, np.full(100, 1.0))
        assert np.allclose(exchange(), 4)
        return comm.clock, dict(exchange.late)

    found = virtual.run(4, program, wire=WIRE)
    assert all(4 < clock < 5 for clock, _ in found)  # rank 1 would end after 8 seconds
    assert 1 not in found[0][1]  # its first block is used


@pytest.mark.no_mpi
@pytest.mark.parametrize(("kind", "m"), [(MdsMulticast, 2), (MdsMulticast, 1), (MdsRing, 2)])
def test_owners_with_different_bits_are_found_out(kind, m):
    def program(comm):
        exchange = kind(comm, MdsCode(cyclic(3, 2), m), 8, np.dtype("float64"))
        for number in range(2):
            exchange.bring(number, np.full(8, 1.0 + (comm.rank == 1)))
        exchange()

    with pytest.raises(CommError, match="computed different bits for the same gradient"):
        virtual.run(3, program)


@pytest.mark.no_mpi
@pytest.mark.parametrize(("kind", "m"), [(MdsMulticast, 2), (MdsMulticast, 1), (MdsRing, 2)])
def test_arrays_that_were_not_agreed(kind, m):
    def program(comm):
        kind(comm, MdsCode(cyclic(3, 2), m), 8, np.dtype("float64")).bring(0, np.zeros(7))

    with pytest.raises(ShapeError, match="array: got 7 elements of float64, expected 8 of float64"):
        virtual.run(3, program)
