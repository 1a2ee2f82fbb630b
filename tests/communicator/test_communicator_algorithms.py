"""`mpiddl.Communicator`: algorithms that a program asks for."""

from __future__ import annotations

from math import factorial

import numpy as np
import pytest
from mpi4py import MPI

from mpiddl.collectives import calls
from mpiddl.communicator import Communicator
from mpiddl.communicator.shortcuts import unfused
from mpiddl.errors import UsageError

pytestmark = pytest.mark.mpi


@pytest.mark.mpi(min_size=2)
def test_a_program_asks_for_algorithms_of_some_calls(comm):
    plain = Communicator(comm.Dup())
    ours = Communicator(comm.Dup(), algorithms={"bcast": "binomial", "allreduce": "library"})
    copy = ours.Dup()
    for one in (ours, copy):
        word, total = np.full(3, comm.rank), np.zeros(500_000)
        one.Bcast(word, 1)
        one.Allreduce(np.ones(500_000), total)
        assert (word == 1).all() and (total == comm.size).all()
        assert str(one.why("bcast", 1)) == "binomial: asked for by the program"
        assert one.why("allgather", 1 << 20) == plain.why("allgather", 1 << 20)
        sent = one._own.link.meter.bytes
        assert sum(comm.allgather(sent)) == (comm.size - 1) * word.nbytes  # nothing of the sum
    for one in (plain, copy, ours):
        one.Free()


@pytest.mark.parametrize(("algorithms", "message"), [
    ("ring", "got 'ring', expected a dict such as"),
    ({"Allreduce": "ring"}, "got the call 'Allreduce', expected one of allreduce, reduce"),
    ({"bcast": "ring"}, "got 'ring' for bcast, expected one of library, chain, scatter, binomial"),
])  # fmt: skip
def test_algorithms_that_there_are_not(comm, algorithms, message):
    with pytest.raises(UsageError, match=f"algorithms: {message}"):
        Communicator(comm, algorithms=algorithms)


NO_KERNEL = [*((kind, "SUM") for kind in "bilqF"), *((kind, op) for kind in "fd" for op in ("MIN", "MAX", "PROD"))]


@pytest.mark.mpi(min_size=2)
def test_what_no_kernel_adds_is_the_librarys_on_one_node(comm, monkeypatch):
    ours = Communicator(comm.Dup())
    assert ours.why("allreduce", 1 << 20).algorithm != "library"
    with monkeypatch.context() as patched:
        for call in ("allreduce", "reduce", "reduce_scatter"):
            patched.setattr(calls, call, None)
        for kind, name in NO_KERNEL:
            op = getattr(MPI, name)
            chosen = {ours.why(call, 1 << 20, kind, op).algorithm for call in ("allreduce", "reduce", "reduce_scatter")}
            assert chosen == {"library"}
            given = np.full(12_000 * comm.size, comm.rank + 1, kind)
            wanted = {"SUM": sum(range(1, comm.size + 1)), "MIN": 1, "MAX": comm.size, "PROD": factorial(comm.size)}[name]
            total, part = np.zeros_like(given), np.zeros_like(given[: given.size // comm.size])
            ours.Allreduce(given, total, op)
            ours.Reduce_scatter_block(given, part, op)
            assert (total == wanted).all() and (part == wanted).all()
            ours.Allreduce([given, given.size], [total, total.size], op)
            ours.Reduce(given, total, op)
            assert (total == wanted).all()
    ours.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("asked", ["allreduce", "allreduce_unfused"])
def test_algorithms_for_what_no_kernel_adds_may_be_asked_for(comm, asked):
    ours, given, total = Communicator(comm.Dup(), algorithms={asked: "ring"}), np.full(30, comm.rank), np.zeros(30, int)
    assert ours.why("allreduce", 240, int).algorithm == "ring"
    assert (ours.why("allreduce", 240).algorithm == "ring") == (asked == "allreduce")
    ours.Allreduce(given, total)
    assert (total == sum(range(comm.size))).all() and ours._own.link.meter.bytes > 0
    ours.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.limit(60)
def test_ranks_may_have_different_objects_for_an_operation(comm):
    """A copy of SUM was taken for an operation that no kernel does: its rank called the library, and the others waited."""
    ours, op = Communicator(comm.Dup()), MPI.Op(MPI.SUM) if comm.rank else MPI.SUM
    given, total, part = np.full(60_000 * comm.size, comm.rank, "d"), np.zeros(60_000 * comm.size), np.zeros(60_000)
    for _ in range(3):
        ours.Allreduce(given, total, op)
        ours.Reduce_scatter_block(given, part, op)
        assert (total == sum(range(comm.size))).all() and (part == total[0]).all()
        total[:] = 0
        ours.Reduce(given, total, op)
        assert (total == (0 if comm.rank else sum(range(comm.size)))).all()
    ours.Free()


@pytest.mark.parametrize("op", ["SUM", "MIN", "MAX", "PROD", "BXOR", "a copy of SUM", "own"])
def test_what_plainly_has_no_kernel(op):
    made = {"a copy of SUM": MPI.Op(MPI.SUM), "own": MPI.Op.Create(lambda one, other, kind: None)}
    given, known = made.get(op) or getattr(MPI, op), op in ("SUM", "MIN", "MAX", "PROD")
    for kind in "fdiqbFD":
        assert unfused(np.zeros(3, kind), given) == (known and (op, kind) not in (("SUM", "f"), ("SUM", "d")))
    made["own"].Free()
