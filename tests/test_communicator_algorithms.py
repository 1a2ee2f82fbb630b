"""`mpiddl.Communicator`: algorithms that a program asks for."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddl.communicator import Communicator
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
