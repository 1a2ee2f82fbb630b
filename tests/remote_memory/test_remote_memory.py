"""Remote memory of each kind: writes, reads, atomic operations and flags."""

from __future__ import annotations

import numpy as np
import pytest
from harness.remote_programs import counts, moves

from mpiddl.errors import MismatchError, ShapeError, TransportError, UsageError
from mpiddl.remote_memory import allocate, expose
from mpiddl.transport import virtual

KINDS = ["shared", "mpi"]


@pytest.mark.mpi
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", [moves, counts])
def test_real_ranks(link, kind, program):
    program(link, kind)


@pytest.mark.no_mpi
@pytest.mark.parametrize("program", [moves, counts])
def test_virtual_ranks(program):
    virtual.run(3, lambda comm: program(comm, "auto"))


@pytest.mark.mpi
@pytest.mark.parametrize(("wrong", "error", "words"), [
    (lambda memory, size: memory.write(size, 0, np.zeros(1)), UsageError, "rank: got"),
    (lambda memory, size: memory.write(0, 10, np.zeros(1)), UsageError, "begin: got bytes 10 to 18, expected bytes within"),
    (lambda memory, size: memory.read(0, -1, np.zeros(1)), UsageError, "begin: got bytes -1 to 7"),
    (lambda memory, size: memory.write(0, 0, np.zeros((2, 2), np.int8)[:, 0]), ShapeError, "source: got an array that is not"),
    (lambda memory, size: memory.read(0, 0, np.frombuffer(b"12345678")), UsageError, "into: got a read-only array"),
    (lambda memory, size: memory.fetch_add(0, 4, 1), UsageError, "begin: got byte 4, expected a multiple of 8"),
    (lambda memory, size: memory.signal(0, 1, 1), UsageError, "flag: got 1, expected 0 to 0"),
    (lambda memory, size: memory.arrived(-1, 1), UsageError, "flag: got -1, expected 0 to 0"),
    (lambda memory, size: memory.signal(0, 0, 1.5), UsageError, "number: got 1.5, expected a whole number from -2"),
    (lambda memory, size: memory.fetch_add(0, 0, 2**63), UsageError, "value: got 9223372036854775808, expected a whole"),
    (lambda memory, size: memory.write(0.0, 0, np.zeros(1)), UsageError, "rank: got 0.0, expected a whole number"),
    (lambda memory, size: memory.write(0, 0, [1, 2]), ShapeError, "source: got list, expected a numpy array of numbers"),
    (lambda memory, size: memory.write(0, 0, np.array([None])), ShapeError, "source: got an array of object, expected"),
])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_make_no_sense(link, kind, wrong, error, words):
    memory = allocate(link, 16, 1, kind)
    with pytest.raises(error, match=words):
        wrong(memory, link.size)
    link.Barrier()
    memory.Free()


@pytest.mark.mpi
def test_allocations_that_make_no_sense(link):
    for options, words in (({"nbytes": -1}, "nbytes: got -1"), ({"nbytes": 1.5}, "nbytes: got 1.5"),
                           ({"nbytes": 1, "flags": True}, "flags: got True"),
                           ({"nbytes": 1, "kind": "tcp"}, "kind: got 'tcp'")):
        with pytest.raises(UsageError, match=words):
            allocate(link, **options)


@pytest.mark.mpi(min_size=2)
def test_allocations_that_differ(link):
    """One error on all ranks, and the next allocation works."""
    last = link.rank == link.size - 1
    for options, error, words in (({"nbytes": 8, "flags": 1 + last}, MismatchError, "allocate: flags: rank 0 got 1"),
                                  ({"nbytes": 8, "kind": "mpi" if last else "shared"}, MismatchError, "allocate: kind: rank 0"),
                                  ({"nbytes": -last}, ShapeError, "nbytes: got -1"),
                                  ({"nbytes": 1 << 62}, ShapeError, "the memory of this host")):
        with pytest.raises(error, match=words):
            allocate(link, **options)
    memory = allocate(link, np.int64(8), 1)
    memory.Free()
    with pytest.raises(UsageError, match="got memory after Free"):
        memory.signal(0, 0, 1)


@pytest.mark.mpi(min_size=2)
def test_an_array_that_exists(link):
    """Also of another length on each rank."""
    array = np.full(3 + link.rank, 10 * link.rank, np.int64)
    memory, into = expose(link, array, "mpi"), np.zeros(1, np.int64)
    right = (link.rank + 1) % link.size
    memory.read(right, 8 * (2 + right), into).Wait()
    assert into[0] == 10 * right and memory.sizes == [8 * (3 + rank) for rank in range(link.size)]
    link.Barrier()
    memory.Free()
    for wrong in (np.zeros(3), np.zeros((2, 2), np.int64), np.frombuffer(bytes(16), np.int64)):
        with pytest.raises(ShapeError, match="array: got shape"):
            expose(link, wrong, "mpi")


@pytest.mark.no_mpi
def test_kinds_that_are_not_there():
    def program(comm):
        for kind, words in (("verbs", "verbs: "), ("mpi", "one-sided memory: got virtual ranks in one process")):
            with pytest.raises(TransportError, match=words):
                allocate(comm, 8, 0, kind)

    virtual.run(2, program)
