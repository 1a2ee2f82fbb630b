"""The transports: real MPI and virtual ranks behave alike; ranks fail together; clocks agree; bytes are counted."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from mpiddl.errors import CommError, DataError, MismatchError, MpiddlError, UsageError
from mpiddl.machine.clock import now
from mpiddl.testbed.rights import TestbedError
from mpiddl.transport import virtual
from mpiddl.transport.agree import agreed, check_equal
from mpiddl.transport.base import ANY_SOURCE, IN_PLACE, MAX, MIN, PROD, SUM
from mpiddl.transport.clock_offset import clock_offset
from mpiddl.transport.meter import allreduce_bytes
from mpiddl.transport.mpi import MpiComm, connect, connected


def all_calls(comm):
    """Every call of the interface once; returns what it gave."""
    rank, size = comm.rank, comm.size
    out = {}
    for op in (SUM, MIN, MAX, PROD):
        mine, total = np.array([rank + 1.0, 2.0]), np.zeros(2)
        comm.Allreduce(mine, total, op)
        out[op.name] = total.tolist()
    grid = np.full((2, 3), float(rank), np.float32)
    request = comm.Iallreduce(IN_PLACE, grid)
    right, left = (rank + 1) % size, (rank - 1) % size
    got = np.zeros(1)
    comm.Sendrecv(np.array([float(rank)]), right, 5, got, left, 5)
    out["left"] = got[0]
    request.Wait()
    assert request.Test()
    out["grid"] = grid.tolist()
    coming = comm.Irecv(got, left, 7)
    leaving = comm.Isend(np.array([rank * 10.0]), right, 7)
    coming.Wait()
    leaving.Wait()
    out["tagged"] = got[0]
    leaving = comm.Isend(np.array([rank * 100.0]), right, 9)
    envelope = comm.Probe(ANY_SOURCE, 9)
    comm.Recv(got, envelope.source, envelope.tag)
    leaving.Wait()
    out["probed"] = (envelope.source, got[0])
    buf = np.arange(3.0) * rank
    comm.Bcast(buf, size - 1)
    out["bcast"] = buf.tolist()
    out["objects"] = comm.allgather({"rank": rank}), comm.bcast(rank, size - 1)
    own = comm.Dup()
    own.Barrier()
    own.patient_barrier()
    own.Free()
    out["counted"] = (comm.meter.bytes, comm.meter.messages, len(comm.meter.spans))
    return out


@pytest.mark.mpi
def test_real_and_virtual_ranks_give_the_same(link):
    assert all_calls(link) == virtual.run(link.size, all_calls)[link.rank]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_call_means_what_mpi_means(size):
    results = virtual.run(size, all_calls)
    for rank, out in enumerate(results):
        left = (rank - 1) % size
        assert out["SUM"] == [size * (size + 1) / 2, 2.0 * size]
        assert out["PROD"] == [float(np.prod(np.arange(1, size + 1))), 2.0**size]
        assert (out["MIN"], out["MAX"]) == ([1.0, 2.0], [float(size), 2.0])
        assert (out["left"], out["tagged"], out["probed"]) == (left, left * 10.0, (left, left * 100.0))
        assert out["grid"] == np.full((2, 3), size * (size - 1) / 2).tolist()
        assert out["bcast"] == (np.arange(3.0) * (size - 1)).tolist()
        assert out["objects"] == ([{"rank": r} for r in range(size)], size - 1)


@pytest.mark.parametrize("size", [2, 3])
def test_a_deadlock_of_virtual_ranks_is_told(size):
    def program(comm):
        if comm.rank:
            comm.Recv(np.zeros(1), 0, 5)

    with pytest.raises(CommError, match="rank 1 waits for a message from 0 under tag 5"):
        virtual.run(size, program)


MISMATCHED = {
    "calls": (lambda comm: comm.Barrier() if comm.rank else comm.Allreduce(IN_PLACE, np.zeros(2)), "calls do not match"),
    "lengths": (lambda comm: comm.Allreduce(IN_PLACE, np.zeros(2 + comm.rank)), "expected the same shape and dtype"),
    "root": (lambda comm: comm.Bcast(np.zeros(2), 5), "root: got 5, expected a rank from 0 to 1"),
    "dest": (lambda comm: comm.Send(np.zeros(2), -1), "dest: got -1"),
    "dtype": (
        lambda comm: comm.Recv(np.zeros(2), 0) if comm.rank else comm.Send(np.zeros(2, int), 1),
        "got 2 numbers of int64, expected at most 2 of float64",
    ),
    "length": (
        lambda comm: comm.Recv(np.zeros(2), 0) if comm.rank else comm.Send(np.zeros(3), 1),
        "got 3 numbers of float64, expected at most 2",
    ),
}


@pytest.mark.parametrize("case", MISMATCHED)
def test_calls_of_virtual_ranks_that_do_not_fit_are_told(case):
    program, message = MISMATCHED[case]
    with pytest.raises(CommError, match=message):
        virtual.run(2, program)


def test_asking_for_ever_is_a_deadlock():
    def program(comm):
        request = comm.Irecv(np.zeros(1), 1 - comm.rank, 3)
        while not request.Test():
            pass

    with pytest.raises(CommError, match=r"waits for a message from . under tag 3, which no rank sends"):
        virtual.run(2, program)


@pytest.mark.parametrize("size", [0, -1])
def test_no_virtual_ranks(size):
    with pytest.raises(UsageError, match=f"size: got {size}"):
        virtual.run(size, lambda comm: None)


def test_a_failing_virtual_rank_ends_all():
    def program(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("on purpose")
        comm.Barrier()

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        virtual.run(3, program)


def test_messages_between_two_virtual_ranks_keep_their_order():
    def program(comm):
        if comm.rank == 0:
            for value in range(5):
                comm.Send(np.array([float(value)]), 1, 3)
            return None
        got = np.zeros(1)
        return [comm.Recv(got, 0, 3) or got[0] for _ in range(5)]

    assert virtual.run(2, program)[1] == [0, 1, 2, 3, 4]


@pytest.mark.mpi
def test_bytes_of_a_collective_are_its_formula(link):
    buf = np.zeros(1000)
    link.Allreduce(IN_PLACE, buf)
    assert link.meter.bytes == allreduce_bytes(link.size, 8000) == 2 * (link.size - 1) * 8000 // link.size


@pytest.mark.mpi
def test_an_error_of_one_rank_is_raised_on_all(link):
    last = link.size - 1
    with pytest.raises(DataError) as caught, agreed(link):
        if link.rank == last:
            raise DataError("x.npy: damaged")
    assert str(caught.value) == ("x.npy: damaged" if link.size == 1 else f"x.npy: damaged (on rank {last} of {link.size})")


class Unreadable(DataError):
    """A caller's own kind of error."""


@pytest.mark.mpi
@pytest.mark.parametrize(("kind", "raised"), [(TestbedError, MpiddlError), (Unreadable, DataError)])
def test_an_error_of_a_class_that_is_defined_elsewhere_is_raised_on_all(link, kind, raised):
    with pytest.raises(raised, match="not today") as caught, agreed(link):
        if link.rank == link.size - 1:
            raise kind("not today")
    assert caught.type is raised


@pytest.mark.mpi(min_size=2)
def test_a_bug_of_one_rank_stays_its_own_and_stops_the_others(link):
    with pytest.raises(KeyError if link.rank == 1 else CommError, match="boom"), agreed(link):
        if link.rank == 1:
            raise KeyError("boom")


@pytest.mark.mpi(min_size=2)
def test_different_settings_are_told_with_their_ranks(link):
    with pytest.raises(MismatchError, match=r"rate: rank 0 got 0\.1, but rank 1 got 0\.2"):
        check_equal(link, "settings", {"seed": 1, "rate": 0.2 if link.rank == 1 else 0.1})


@pytest.mark.mpi
def test_clocks_of_one_node_agree(link):
    ahead = 1000.0 * link.rank
    link.now = lambda: now() + ahead  # else the kernel's, which is that of all ranks
    began = now()
    offset = clock_offset(link)
    assert abs(offset + ahead) <= now() - began  # at most half a round trip


@pytest.mark.mpi(min_size=2)
def test_waiting_is_what_the_last_rank_makes_the_others_wait(link, monkeypatch):
    """By a clock that stands still but for the tenths of a second that rank 1 takes, and the others wait in the call."""
    from mpiddl.training.metrics import Lines, Metrics

    time, over = [0.0], MpiComm._synchronised

    def synchronised(comm, entered):
        time[0] = max(comm.raw.allgather(time[0]))
        over(comm, entered)

    monkeypatch.setattr(MpiComm, "now", staticmethod(lambda: time[0]))
    monkeypatch.setattr(MpiComm, "_synchronised", synchronised)
    metrics = Metrics(link.Dup(), link.meter, 0.0, Lines(None), lockstep=True)
    for _ in range(3):
        time[0] += 0.1 * (link.rank == 1)
        link.Allreduce(IN_PLACE, np.zeros(10))
    splits = metrics.finish()
    assert [split.waiting for split in splits] == pytest.approx([0.0 if rank == 1 else 0.3 for rank in range(link.size)])
    assert [split.compute for split in splits] == pytest.approx([0.3 if rank == 1 else 0.0 for rank in range(link.size)])
    metrics.comm.Free()


@pytest.mark.mpi
def test_what_is_no_communicator_is_named(comm):
    with pytest.raises(CommError, match="comm: got int, expected an mpi4py intra-communicator"):
        connect(3)


@pytest.mark.mpi(min_size=2)
def test_a_part_of_the_ranks_can_work_alone(comm):
    half = comm.Split(comm.rank % 2)
    link = connect(half)
    total = np.ones(1)
    link.Allreduce(IN_PLACE, total)
    assert total[0] == half.size
    link.Free()
    half.Free()


@pytest.mark.mpi
def test_a_link_lends_the_same_duplicate_until_something_fails_there(comm):
    link = connect(comm)
    with connected(link, {}) as first, connected(link, {}) as second:
        assert first is second and first is not link
    with pytest.raises(ValueError, match="of all"), connected(link, {}):
        raise ValueError("of all")
    assert first.freed and not link.freed
    with connected(link, {}) as third:
        total = np.ones(1)
        third.Allreduce(IN_PLACE, total)
        assert third is not first and total[0] == comm.size
    link.Free()
    assert third.freed


@pytest.mark.mpi
def test_a_request_that_has_failed_fails_again(comm, link):
    """After its first error an MPI library takes a request for complete."""

    class Failing:
        answers = iter([False])

        def Test(self):
            if next(self.answers, True):
                return True
            raise MPI.Exception(MPI.ERR_TRUNCATE)

        Wait = Test

    request, sent = link.Irecv(np.zeros(9), link.rank, 5), link.Isend(np.zeros(9), link.rank, 5)
    raw, request.raw = request.raw, Failing()
    for ask in (request.Wait, request.Wait, request.Test):
        with pytest.raises(MPI.Exception):
            ask()
    raw.Wait(), sent.Wait()
