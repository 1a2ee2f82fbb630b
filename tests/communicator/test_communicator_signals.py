"""`mpiddl.Communicator`: what a signal's handler raises in the middle of a call."""

from __future__ import annotations

import os
import signal
import time
from queue import SimpleQueue
from threading import Thread, get_ident

import numpy as np
import pytest

from mpiddl.collectives import TwoStep, calls
from mpiddl.errors import CommError
from mpiddl.node.topology import neighbours
from mpiddl.transport.comm import CommRequest
from mpiddl.transport.mpi import MpiComm, connected, failing_together
from mpiddl.transport.shared_memory import KernelRequest
from mpiddl.transport.start import load_mpi

pytestmark = pytest.mark.mpi


class Rung(Exception):
    """What a program's signal handler raises."""


WAITS = (MpiComm, "wait"), (MpiComm, "progress"), (CommRequest, "Wait"), (KernelRequest, "Wait")
"""Where a rank waits for others in the middle of a call, or looks again and again."""


@pytest.fixture
def ring(mpi_tmp_path, monkeypatch):
    """``ring(times)``: this rank's main thread gets a signal in its next wait for other ranks; the handler raises `Rung`.

    Each further signal comes in the next wait after the handler has run. ``ring.sent()`` waits, on another rank, until the
    last one has come: the waiting call cannot be over before that.
    """
    main, armed, waits, rung, threads = get_ident(), [], SimpleQueue(), SimpleQueue(), []
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # as Python asks for

    def handler(number, frame):
        rung.put(None)
        raise Rung

    def send(times):
        for _ in range(times):
            armed.append(True)
            waits.get()
            signal.pthread_kill(main, signal.SIGUSR1)
            os.read(reading, 1)  # the interpreter knows of it: the main thread takes no step more before the handler
            if times > 1:
                rung.get()
        (mpi_tmp_path / "sent").touch()  # by this thread: the other one may be in the library

    def telling(wait):
        def told(*args, **options):
            if armed and get_ident() == main:
                armed.clear()
                waits.put(None)
            return wait(*args, **options)

        return told

    def ring(times=1):
        threads.append(Thread(target=send, args=(times,), daemon=True))
        threads[-1].start()

    def sent():
        while not (mpi_tmp_path / "sent").exists():
            time.sleep(0.005)

    ring.sent = sent
    for owner, name in WAITS:
        monkeypatch.setattr(owner, name, telling(getattr(owner, name)))
    before, wakeup = signal.signal(signal.SIGUSR1, handler), signal.set_wakeup_fd(writing)
    yield ring
    signal.signal(signal.SIGUSR1, before)
    signal.set_wakeup_fd(wakeup)
    for thread in threads:
        thread.join()
    os.close(reading)
    os.close(writing)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("call", ["two-step", "two-step of integers", "ring", "Bcast", "Bcast of columns", "Reduce",
                                  "Allgather", "Reduce_scatter_block", "Barrier", "Iallreduce"])  # fmt: skip
def test_an_exception_of_a_signal_comes_when_the_call_is_over(comm, forced, ring, call, first):
    MPI = load_mpi()
    ours, n, root = forced("ring" if call == "ring" else "two-step"), 6000, comm.size - 1
    columns, requests = MPI.DOUBLE.Create_vector(n // 2, 1, 2).Commit(), []

    def called(value):
        x, out, some, wide = np.full(n, value), np.zeros(n), np.zeros(6), np.zeros((comm.size, n))
        out[:] = value if comm.rank == root else 0
        try:
            if call == "two-step of integers":
                ours.Allreduce(x.astype(int), whole := np.zeros(n, int))
                out[:] = whole
            elif call in ("two-step", "ring"):
                ours.Allreduce(x, out)
            elif call == "Iallreduce":
                requests.append(ours.Iallreduce(x, out))
                requests[-1].Wait()
            elif call.startswith("Bcast"):
                ours.Bcast([out, 1, columns] if "columns" in call else out, root)
            elif call == "Reduce":
                ours.Reduce(x, out, root=0)
            elif call == "Allgather":
                ours.Allgather(x, wide)
                out[:] = wide.sum(0)
            elif call == "Reduce_scatter_block":
                ours.Reduce_scatter_block(np.full(6 * comm.size, value), some)
                out[:] = some[0]
            else:
                ours.Barrier()
        except Rung:
            return out, True
        return out, False

    if not first:
        called(1.0)
    comm.Barrier()
    if comm.rank == 0:
        ring()
    else:
        ring.sent()
    for value in (3.0, 5.0, 7.0):
        found, rung = called(value)
        assert rung == (comm.rank == 0 and value == 3)
        wanted = value if call.startswith("Bcast") else comm.size * value
        if call in ("two-step", "ring", "Bcast") or (call == "Reduce" and comm.rank == 0):
            assert (found == wanted).all()
        elif call == "Bcast of columns":
            assert (found[::2] == wanted).all()
        elif not rung and call not in ("Reduce", "Barrier"):
            assert (found == wanted).all()
    assert all(request == MPI.REQUEST_NULL for request in requests)
    columns.Free()


@pytest.mark.mpi(min_size=2)
def test_a_second_exception_ends_a_call_and_the_communicator(comm, forced, ring):
    ours, x = forced(), np.ones(100)
    ours.Allreduce(x, x.copy())
    comm.Barrier()
    if comm.rank == 0:  # alone: it would wait for ever
        ring(times=2)
        with pytest.raises(Rung):
            ours.Allreduce(x, x.copy())
        for call in (lambda: ours.Allreduce(x, x.copy()), lambda: ours.Bcast(x), lambda: ours.Iallreduce(x, x.copy())):
            with pytest.raises(CommError, match=r"cannot be used any more, because an exception ended a collective call early"):
                call()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_an_exception_of_a_signal_comes_when_a_plan_is_through(link, ring):
    plan = TwoStep(link, 100, "d")
    for value in (1.0, 2.0, 3.0):
        plan.input[:] = value
        link.Barrier()
        if value == 2 and link.rank == 0:
            ring()
            with pytest.raises(Rung):
                plan()
        else:
            if value == 2:
                ring.sent()
            plan()
        assert (plan.result == link.size * value).all()
    link.Barrier()
    if link.rank == 0:  # alone: it would wait for ever
        ring(times=2)
        with pytest.raises(Rung):
            plan()
        with pytest.raises(CommError, match="ended a collective call early"):
            plan()
    link.Barrier()


@pytest.fixture
def rung(monkeypatch):
    """``rung()``: a signal comes in the next wait for others before something is made with them."""

    def ring():
        def wait(self, request, pause_s=0.0):
            monkeypatch.setattr(MpiComm, "wait", real)
            raise Rung

        monkeypatch.setattr(MpiComm, "wait", wait)

    real = MpiComm.wait
    return ring


@pytest.mark.mpi(min_size=2)
def test_an_exception_of_a_signal_comes_when_a_communicator_is_made(comm, rung):
    from mpiddl.communicator import Communicator

    handle, x, told = comm.Dup(), np.ones(10_000), []
    if comm.rank == 0:
        rung()
        with pytest.raises(Rung):
            Communicator(handle)
    ours = Communicator(handle)
    for call in (lambda late: late.Bcast(x), lambda late: late.Allreduce(x, x.copy())):
        late = ours.Dup()
        late._enough = x.nbytes
        if comm.rank == 0:
            rung()
            with pytest.raises(Rung):
                call(late)
        else:
            call(late)
        call(late)
        told.append(late.why("bcast", x.nbytes).algorithm)
        late.Free()
    ours.Free()
    assert told == ["library"] * 2


def test_an_exception_of_a_signal_is_not_kept_where_no_collective_follows(link, rung):
    comm = link.Dup()
    rung()
    with pytest.raises(Rung), connected(comm, None):
        pass
    rung()
    with pytest.raises(Rung), failing_together(comm.Dup()) as other:
        neighbours(other)
    rung()
    with pytest.raises(Rung):
        comm.kept("nothing", _fails)
    comm.kept("something", list)
    rung()
    neighbours(comm)
    plan = TwoStep(comm, 10, "d")
    plan.input[:] = 1
    with pytest.raises(Rung):
        plan()
    assert (plan() == comm.size).all() and not comm.broken
    rung()
    comm.kept("one", list)
    rung()
    with pytest.raises(Rung):
        comm.kept("two", list)
    assert comm.broken
    comm.raw.Barrier()


def _fails():
    raise CommError("on all ranks")


@pytest.mark.mpi(min_size=2)
def test_an_exception_between_the_steps_ends_the_communicator(comm, forced, monkeypatch):
    def fails(comm, source, result, op):
        raise Rung
        yield

    ours, x = forced("ring"), np.ones(100)
    monkeypatch.setitem(calls.ALLREDUCE, "ring", lambda *args: ((), fails(*args), None))
    with pytest.raises(Rung):
        ours.Allreduce(x, x.copy())
    with pytest.raises(CommError, match="ended a collective call early"):
        ours.Bcast(x)
