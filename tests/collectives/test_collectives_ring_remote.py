"""The ring over remote memory: sums, bits, bytes, and calls that follow each other without any agreement."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from mpiddl.collectives import allreduce
from mpiddl.collectives.allreduce_ring_remote import RemoteRing
from mpiddl.transport import virtual
from mpiddl.transport.base import MAX, SUM

SIZES = [0, 1, 3, 1000, 60_001]


def program(comm, size, kind="auto", op=SUM, dtype="float32", segment_bytes=4096):
    ring, theirs = RemoteRing(comm, size, np.dtype(dtype), op, kind, segment_bytes), np.zeros(size, dtype)
    for step in range(4):
        array = (100 * np.random.default_rng([size, step, comm.rank]).standard_normal(size)).astype(dtype)
        ring.input[:] = array
        ours = ring()
        allreduce(comm, array, theirs, op, algorithm="ring")
        assert ours.tobytes() == theirs.tobytes()
    ring.Free()


@pytest.mark.no_mpi
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_bits_of_the_ring_on_virtual_ranks(ranks, size):
    virtual.run(ranks, lambda comm: program(comm, size))


@pytest.mark.no_mpi
@pytest.mark.parametrize(("op", "dtype"), [(MAX, "float64"), (SUM, "int64"), (SUM, "complex64"), (MAX, "uint8")])
def test_other_operations_and_types(op, dtype):
    virtual.run(3, lambda comm: program(comm, 1000, op=op, dtype=dtype))


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("kind", ["shared", "mpi"])
@pytest.mark.parametrize("size", [0, 1, 60_001])
def test_bits_of_the_ring_on_real_ranks(link, kind, size):
    program(link, size, kind)


@pytest.mark.no_mpi
def test_a_fast_rank_does_not_overwrite_what_a_slow_one_needs():
    """In simulated time, each rank in turn is far behind the others."""

    def late(comm):
        ring = RemoteRing(comm, 100, np.dtype(np.float64), segment_bytes=80)
        for step in range(6):
            comm.compute(10.0 if step % comm.size == comm.rank else 0.1)
            ring.input[:] = comm.rank + step
            assert (ring() == sum(rank + step for rank in range(comm.size))).all()
        ring.Free()

    virtual.run(3, late, wire=virtual.Wire(1e-3, 1e6))


@pytest.mark.no_mpi
def test_bytes_are_those_of_the_formula():
    def sent(comm):
        ring = RemoteRing(comm, 1000, np.dtype(np.float32))
        before = comm.meter.bytes
        ring()
        return comm.meter.bytes - before

    assert sum(virtual.run(4, sent)) == 2 * 3 * 4000


@pytest.mark.mpi(min_size=2)
def test_the_ring_over_mpi_where_verbs_do_not_work(link, monkeypatch):
    """Rank 0 says so once."""
    monkeypatch.setenv("MPIDDL_VERBS", "there-is-none")
    array, ours, theirs = np.arange(1000.0) + link.rank, np.zeros(1000), np.zeros(1000)
    allreduce(link, array, theirs, algorithm="ring")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            allreduce(link, array, ours, algorithm="ring-verbs")
            assert ours.tobytes() == theirs.tobytes()
    assert [str(each.message).startswith("verbs: ") for each in said] == [True] * (link.rank == 0)
