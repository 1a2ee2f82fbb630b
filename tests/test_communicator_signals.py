"""`mpiddl.Communicator`: what a signal's handler raises in the middle of a call."""

from __future__ import annotations

import signal
import time
from threading import Timer, get_ident

import numpy as np
import pytest

from mpiddl.collectives import calls
from mpiddl.errors import CommError
from mpiddl.transport.start import load_mpi

pytestmark = pytest.mark.mpi


class Rung(Exception):
    """What a program's signal handler raises."""


@pytest.fixture
def ring():
    """``ring(delays)``: this rank's main thread gets signals after so many seconds; their handler raises `Rung`."""

    def handler(number, frame):
        raise Rung

    def ring(*delays):
        timers.extend(Timer(delay, signal.pthread_kill, (get_ident(), signal.SIGUSR1)) for delay in delays)
        for timer in timers:
            timer.start()

    timers, before = [], signal.signal(signal.SIGUSR1, handler)
    yield ring
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("call", ["two-step", "two-step of integers", "ring", "Bcast", "Bcast of columns", "Reduce",
                                  "Allgather", "Reduce_scatter_block", "Barrier", "Iallreduce"])  # fmt: skip
def test_an_exception_of_a_signal_comes_when_the_call_is_over(comm, forced, ring, call, first):
    MPI = load_mpi()
    ours, n, root = forced("ring" if call == "ring" else "two-step"), 6000, comm.size - 1
    columns = MPI.DOUBLE.Create_vector(n // 2, 1, 2).Commit()

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
                ours.Iallreduce(x, out).Wait()
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
        ring(0.1)
    else:
        time.sleep(0.6)  # on a busy machine, too, the signal comes before
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
    columns.Free()


@pytest.mark.mpi(min_size=2)
def test_a_second_exception_ends_a_call_and_the_communicator(comm, forced, ring):
    ours, x = forced(), np.ones(100)
    ours.Allreduce(x, x.copy())
    comm.Barrier()
    if comm.rank == 0:  # alone: it would wait for ever
        ring(0.1, 0.3)
        with pytest.raises(Rung):
            ours.Allreduce(x, x.copy())
        for call in (lambda: ours.Allreduce(x, x.copy()), lambda: ours.Bcast(x), lambda: ours.Iallreduce(x, x.copy())):
            with pytest.raises(CommError, match=r"ended a collective in the middle; .* cannot be used any more"):
                call()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_an_exception_between_the_steps_ends_the_communicator(comm, forced, monkeypatch):
    def fails(comm, source, result, op):
        raise Rung
        yield

    ours, x = forced("ring"), np.ones(100)
    monkeypatch.setitem(calls.ALLREDUCE, "ring", lambda *args: ((), fails(*args), None))
    with pytest.raises(Rung):
        ours.Allreduce(x, x.copy())
    with pytest.raises(CommError, match="ended a collective in the middle"):
        ours.Bcast(x)
