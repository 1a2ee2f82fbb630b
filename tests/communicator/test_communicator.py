"""`mpiddl.Communicator`: mpi4py's semantics with our algorithms underneath."""

from __future__ import annotations

import os
import pickle
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from harness.tiers import only

from mpiddl.collectives import calls
from mpiddl.errors import CommError
from mpiddl.transport.start import load_mpi

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", ["read", "two-step", "ring", "doubling", "library"])
@pytest.mark.parametrize("dtype", only("fiB", ["f", "d", "i", "q", "F", "B"]))
@pytest.mark.parametrize("n", only({0, 7, 1000}, [0, 1, 7, 1000]))
def test_sums_are_the_librarys(comm, forced, name, dtype, n):
    ours = forced(name)
    source = (np.arange(n) % 5 + comm.rank).astype(dtype)
    wanted, found = np.zeros(n, dtype), np.zeros(n, dtype)
    comm.Allreduce(source, wanted)
    ours.Allreduce(source, found)
    np.testing.assert_array_equal(found, wanted)
    found[:] = source
    ours.Allreduce(load_mpi().IN_PLACE, found)
    np.testing.assert_array_equal(found, wanted)
    root, found = comm.size - 1, np.zeros(n, dtype)
    ours.Reduce(source, found if comm.rank == root else None, root=root)
    assert comm.rank != root or (found == wanted).all()


@pytest.mark.parametrize("op", ["MAX", "MIN", "PROD", "BOR", "LAND", "MAXLOC"])
def test_operations_that_are_not_ours_are_the_librarys(comm, forced, op):
    MPI = load_mpi()
    ours, kind = forced(), MPI.INT_INT if op == "MAXLOC" else MPI.INT
    source = np.array([3, 1, 2, 0], np.int32) + comm.rank
    wanted, found = np.zeros_like(source), np.zeros_like(source)
    comm.Allreduce([source, kind], [wanted, kind], getattr(MPI, op))
    ours.Allreduce([source, kind], [found, kind], getattr(MPI, op))
    np.testing.assert_array_equal(found, wanted)


def test_free_lets_requests_come_to_their_end(comm, forced):
    MPI = load_mpi()
    ours = forced("ring")
    source, total = np.full(300_000, comm.rank + 1.0), np.zeros(300_000)
    request = ours.Iallreduce(source, total)
    ours.Free()
    MPI.Request.Waitall([request])
    assert (total == comm.size * (comm.size + 1) / 2).all()


@pytest.mark.mpi(min_size=2)
def test_requests_are_the_librarys_where_one_rank_has_no_threads(comm, monkeypatch):
    from mpiddl.communicator import Communicator

    MPI = load_mpi()
    if comm.rank == 0:
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SINGLE)
    ours = Communicator(comm.Dup())
    assert not ours._private.threads
    source, total = np.ones(100_000), np.zeros(100_000)  # mpi4py itself keeps neither alive
    ours.Iallreduce(source, total).Wait()
    assert (total == comm.size).all()
    ours.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("trouble", ["no room", "no kernels"])
@pytest.mark.parametrize("call", ["Allreduce MAX", "Allreduce", "Iallreduce", "Reduce", "Reduce_scatter_block"])
def test_without_shared_memory_calls_are_the_librarys(comm, forced, monkeypatch, call, trouble):
    """On all ranks, though one alone has none; it is said once."""
    from mpiddl.errors import OutputError
    from mpiddl.transport import shared_memory as shared

    MPI, n = load_mpi(), 60_000
    ours = forced("two-step" if "MAX" in call or call == "Iallreduce" else "read")
    if "read" in ours._algorithms.values() and not ours._own.choice.reads:
        pytest.skip("ranks may not read each other's memory here")

    class Unloadable:
        def __getattr__(self, name):
            raise OutputError("numba cache: got no folder")

    if comm.rank == comm.size - 1:
        full = os.statvfs_result((4096, 4096, 100, 1, 1, 0, 0, 0, 0, 255))
        if trouble == "no room":
            monkeypatch.setattr(os, "statvfs", lambda path: full)
        else:
            monkeypatch.setattr(shared, "kernels", Unloadable())
    source, total = np.arange(float(n)) + comm.rank, np.zeros(n)
    wanted = comm.size * np.arange(float(n)) + comm.size * (comm.size - 1) / 2
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            total[:] = 0
            if "MAX" in call:
                ours.Allreduce(source, total, MPI.MAX)
            elif call == "Reduce_scatter_block":
                ours.Reduce_scatter_block(source, total[: n // comm.size])
            elif call == "Reduce":
                ours.Reduce(source, total, root=1)
            elif call == "Allreduce":
                ours.Allreduce(source, total)
            else:
                ours.Iallreduce(source, total).Wait()
            if "MAX" in call:
                assert (total == np.arange(float(n)) + comm.size - 1).all()
            elif call == "Reduce_scatter_block":
                mine = wanted.reshape(comm.size, -1)[comm.rank]
                assert (total[: n // comm.size] == mine).all()
            elif call != "Reduce" or comm.rank == 1:
                assert (total == wanted).all()
    what = "MB needed" if trouble == "no room" else "got no folder"
    told = [str(one.message) for one in said if "the MPI library's algorithm is used" in str(one.message)]
    assert len(told) == (comm.rank == 0) and all(what in words for words in told)
    name = {"R": "reduce", "A": "allreduce", "I": "allreduce"}[call[0]] if call != "Reduce_scatter_block" else "reduce_scatter"
    assert ours.why(name, source.nbytes).algorithm == "library" and what in ours.why(name, source.nbytes).why
    monkeypatch.undo()
    ours.Bcast(total)


def test_a_collective_cannot_be_cancelled(comm, forced):
    MPI = load_mpi()
    ours, x = forced("ring"), np.ones(1000)
    request = ours.Iallreduce(MPI.IN_PLACE, x)
    if comm.size > 1:
        with pytest.raises(MPI.Exception):
            request.Cancel()
    request.Wait()


@pytest.mark.parametrize("wrong", ["sizes", "stride", "read-only", "root", "text", "root text", "no root", "roots", "far root"])
def test_errors_are_mpi4pys(comm, forced, wrong):
    MPI = load_mpi()
    source, result = np.ones(4), np.zeros(4)
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    calls = {
        "sizes": lambda comm: comm.Allreduce(source, result[:3]),
        "stride": lambda comm: comm.Allreduce(source, np.zeros(8)[::2]),
        "read-only": lambda comm: comm.Allreduce(source, frozen),
        "root": lambda comm: comm.Bcast(source, comm.size),
        "text": lambda comm: comm.Allreduce(source, "four"),
        "root text": lambda comm: comm.Bcast(source, "0"),
        "no root": lambda comm: comm.Reduce(source, result, root=None),
        "roots": lambda comm: comm.Bcast(source, [0]),
        "far root": lambda comm: comm.Ibcast(source, 2**40),
    }
    with pytest.raises(Exception) as theirs:
        calls[wrong](MPI.Intracomm(comm))
    with pytest.raises(type(theirs.value)) as found:
        calls[wrong](forced())
    assert _text(found.value) == _text(theirs.value)


def _text(error):
    """Without handles."""
    return re.sub(r"0x[0-9a-f]+", "", str(error))


class Late:
    """A request that is there once ``closing`` holds something, after these exceptions of a signal's handler."""

    def __init__(self, closing, *errors):
        self.closing, self.errors = closing, list(errors)

    def Test(self):
        if self.closing and self.errors:
            raise self.errors.pop()
        return bool(self.closing)

    def Wait(self):
        while not self.Test():
            pass


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", ["a failure", "a signal", "both"])
def test_whatever_is_raised_all_is_freed(comm, forced, monkeypatch, what):
    def steps(fails, *errors):
        yield Late(closing, *errors)
        if fails:
            raise ZeroDivisionError

    ours, x = forced("ring"), np.ones(100)
    given = {"a failure": [(True,)], "a signal": [(False, KeyboardInterrupt()), (False,)],
             "both": [(False, KeyboardInterrupt()), (True,)]}[what]  # fmt: skip
    requests, closing, link, freed = [], [], ours._private.link, []
    ours._private._progress = SimpleNamespace(begin=lambda: None, Free=lambda: freed.append("thread"))
    for args in given:
        monkeypatch.setitem(calls.ALLREDUCE, "ring", lambda *_, args=args: ((), steps(*args), None))
        requests.append(ours.Iallreduce(x, x.copy()))
    closing.append(True)
    if what == "a failure":
        ours.Free()
    else:
        with pytest.raises(KeyboardInterrupt):
            ours.Free()
    assert ours == load_mpi().COMM_NULL and link.freed and not link.started and freed == ["thread"]
    for request, (fails, *_) in zip(requests, given, strict=True):
        if fails:
            with pytest.raises(ZeroDivisionError):
                request.Wait()
        else:
            request.Wait()
        assert request == load_mpi().REQUEST_NULL


@pytest.mark.parametrize("shift", [0, 3])
def test_a_root_may_reduce_into_what_it_sends(comm, forced, shift):
    ours, room = forced(), np.arange(103.0) + comm.rank
    wanted = comm.size * np.arange(100.0) + comm.size * (comm.size - 1) / 2
    if comm.rank == 0 and comm.size > 1:
        ours.Reduce(room[:100], room[shift : shift + 100])
        assert (room[shift : shift + 100] == wanted).all()
    elif comm.rank:
        ours.Reduce(room[:100], None)


@pytest.mark.mpi(min_size=2)
def test_an_inter_communicator_is_refused_as_mpi4py_does(comm, forced):
    from mpiddl.communicator import Communicator

    half = comm.Split(comm.rank == 0)
    between = half.Create_intercomm(0, comm, 1 if comm.rank == 0 else 0)
    with pytest.raises(TypeError, match="intracommunicator"):
        Communicator(between)
    between.Free()
    half.Free()


@pytest.mark.mpi(min_size=2)
def test_what_is_always_the_librarys_goes_there_at_once(comm, monkeypatch):
    from mpiddl.communicator import Communicator
    from mpiddl.tuning import choice

    class Counting(Communicator):
        calls = 0

        def Bcast(self, buf, root=0):
            self.calls += 1
            super().Bcast(buf, root)

    steps = {"allreduce": ((4096, "two-step"),)}
    monkeypatch.setattr(choice.rule, "steps", lambda _, call, library, reads: steps.get(call, ()))
    raw = load_mpi().COMM_WORLD.Dup()
    ours, other, own = Communicator(raw), Communicator(raw), Counting(raw)
    assert {"Bcast", "Barrier", "Allreduce"} <= set(vars(ours)) and "Bcast" not in vars(own)
    for n in (1, 511, 512, 100_000):
        for one in (ours, own):
            x = np.full(n, one.rank + 1.0)
            one.Allreduce(load_mpi().IN_PLACE, x)
            np.testing.assert_array_equal(x, one.size * (one.size + 1) / 2)
            one.Bcast(x)
            one.Allreduce([x, load_mpi().DOUBLE], y := np.zeros(n), op=load_mpi().MAX)
            np.testing.assert_array_equal(x, y)
            one.Barrier()
    assert own.calls == 4
    with pytest.raises(load_mpi().Exception):
        ours.Bcast(x, root=-5)
    raw.Free()
    assert not set(vars(ours)) & {"Bcast", "Barrier", "Allreduce"}
    for one in (ours, other, own):
        with pytest.raises(CommError, match="whose MPI handle was freed"):
            one.Allreduce(load_mpi().IN_PLACE, np.ones(3))
        with pytest.raises(CommError, match="whose MPI handle was freed"):
            one.Bcast(np.ones(3))


def test_why(comm, forced):
    from mpiddl.communicator import Communicator

    ours = forced("ring")
    told = ours.why("allreduce", 1 << 20)
    if comm.size > 1:
        assert str(told) == "ring: asked for by the program"
    with pytest.raises(ValueError, match="call: got 'sum', expected one of allreduce"):
        ours.why("sum", 1)
    with pytest.raises(ValueError, match="nbytes: got -1"):
        ours.why("bcast", -1)
    late = ours.Dup()
    assert type(late) is Communicator and "Prepare" in str(late.why("bcast", 8))
    late.Prepare()
    assert "Prepare" not in str(late.why("bcast", 8)) or comm.size == 1
    late.Free()


def test_without_threads_requests_are_the_librarys(comm, forced, monkeypatch):
    from mpiddl.communicator.request import CollectiveRequest

    MPI = load_mpi()
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    ours, x = forced(), np.ones(1000)
    request = ours.Iallreduce(MPI.IN_PLACE, x)
    assert not isinstance(request, CollectiveRequest)
    request.Wait()
    assert x[0] == comm.size


def test_only_named_ones_are_pickled(comm, forced):
    ours = forced()
    with pytest.raises(ValueError, match="cannot serialize"):
        pickle.dumps(ours)


@pytest.mark.mpi(min_size=2)
def test_what_a_program_has_bound_stays(comm):
    from mpiddl.communicator import Communicator

    ours, seen = Communicator(comm.Dup()), []
    late = ours.Dup()
    ours.Barrier = late.Bcast = seen.append
    late.Prepare()
    late.Bcast("late")
    late.Free()
    ours.Free()
    assert seen == ["late"] and ours.Barrier == late.Bcast == seen.append
    assert not {"Barrier", "Allreduce"} & set(vars(late)) and "Allreduce" not in vars(ours)


@pytest.mark.mpi(min_size=2)
def test_an_empty_name_asks_for_no_table(comm, tmp_path, monkeypatch):
    from mpiddl.communicator import Communicator

    monkeypatch.setenv("MPIDDL_TUNE", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Communicator(comm.Dup()).Free()


@pytest.mark.mpi(min_size=2)
def test_a_warning_that_is_an_error_is_all_ranks(comm, tmp_path):
    from mpiddl.communicator import Communicator

    handle = comm.Dup()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning if comm.rank == 0 else CommError, match="there is no table"):
            Communicator(handle, table=tmp_path / "none.toml")
    handle.Free()
