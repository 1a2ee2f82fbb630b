"""`mpiddl.Communicator`: mpi4py's semantics with our algorithms underneath, whatever is given to it."""

from __future__ import annotations

import copy
import pickle
import re
import signal
import time
import warnings
from array import array
from concurrent.futures import ThreadPoolExecutor
from threading import Timer, get_ident

import numpy as np
import pytest

from mpiddl.collectives import calls
from mpiddl.errors import CommError
from mpiddl.transport.message import payload
from mpiddl.transport.start import load_mpi

EVERY = ("allreduce", "reduce", "bcast", "allgather", "reduce_scatter", "barrier")
ALGORITHMS = {"two-step": "two-step", "ring": "ring", "doubling": "doubling", "library": "library"}
OTHERS = {"reduce": "scatter", "bcast": "chain", "allgather": "ring", "reduce_scatter": "ring", "barrier": "dissemination"}

pytestmark = pytest.mark.mpi


@pytest.fixture
def forced(comm, monkeypatch):
    """Communicators that take our algorithms whatever the size; freed afterwards."""
    from mpiddl.communicator import Communicator, faster
    from mpiddl.tuning import choice

    made = []

    def make(name="two-step", raw=None):
        taken = {"allreduce": name, **(OTHERS if name != "library" else dict.fromkeys(OTHERS, "library"))}
        monkeypatch.setattr(choice.rule, "steps", lambda topology, call: ((0, taken[call]),))
        monkeypatch.setattr(faster, "FLOOR", 0)
        monkeypatch.setattr(faster, "NONBLOCKING_FLOOR", 1)
        monkeypatch.setattr(faster.Faster, "_floors", dict.fromkeys(EVERY, 0.0))
        made.append(Communicator((comm if raw is None else raw).Dup()))
        return made[-1]

    yield make
    for one in made:
        if one != load_mpi().COMM_NULL:
            one.Free()


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["f", "d", "i", "q", "F", "B"])
@pytest.mark.parametrize("n", [0, 1, 7, 1000])
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


def test_however_a_message_is_written(comm, forced):
    MPI = load_mpi()
    ours, total = forced(), comm.size * (comm.size + 1) / 2
    source = np.full(4, comm.rank + 1.0)
    room = np.zeros(8)
    for spec, where in (
        (room[:4], slice(0, 4)), ([room, 4], slice(0, 4)), ([room, 4, MPI.DOUBLE], slice(0, 4)), ([room, (4, 2)], slice(2, 6)),
        ([room, (4, 3), "d"], slice(3, 7)), ((room, 4, 4, MPI.DOUBLE), slice(4, 8)),
        ([room.view(np.uint8), 4, MPI.DOUBLE], slice(0, 4)),
        (room.reshape(2, 4)[1], slice(4, 8)), (np.asfortranarray(room.reshape(2, 4))[:, :0], slice(0, 0)),
    ):  # fmt: skip
        room[:] = 0
        ours.Allreduce([source, MPI.DOUBLE] if where.stop > where.start else source[:0], spec)
        assert (room[where] == total).all() and room.sum() == total * (where.stop - where.start)
    plain = array("d", [0.0] * 4)
    ours.Allreduce(array("d", source), plain)
    assert list(plain) == [total] * 4
    odd = np.zeros(33, np.uint8)[1:]  # off its boundary
    ours.Allreduce(source, [odd, MPI.DOUBLE])
    assert (odd.copy().view(float) == total).all()


def test_ranks_may_lay_out_a_message_differently(comm, forced):
    MPI = load_mpi()
    ours, root = forced(), 0
    column = MPI.DOUBLE.Create_vector(5, 1, 3).Commit()
    grid = np.zeros((5, 3))
    values = np.arange(5.0) + 1
    if comm.rank == root:
        ours.Bcast([values, MPI.DOUBLE], root)
    else:
        ours.Bcast([grid, 1, column], root)
        assert (grid[:, 0] == values).all() and not grid[:, 1:].any()
    everybody = np.zeros((comm.size, 5))
    grid[:, 0] = values + comm.rank
    ours.Allgather([grid, 1, column] if comm.rank % 2 else values + comm.rank, everybody)
    assert (everybody == values + np.arange(comm.size)[:, None]).all()
    column.Free()


class Carrier:
    """A buffer that only speaks DLPack."""

    def __init__(self, values):
        self._values = values

    def __dlpack__(self, **options):
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


@pytest.mark.parametrize("odd", ["lb", "bottom", "resized", "letters", "dlpack", "vector in bytes"])
def test_one_rank_may_broadcast_in_an_odd_way(comm, forced, odd):
    MPI = load_mpi()
    ours, n = forced(), 6
    values = np.arange(n, dtype=float)
    room = np.zeros(2 * n)
    types = []

    def made(kind):
        types.append(kind.Commit())
        return kind

    odd_one = {
        "lb": lambda: [room, 1, made(MPI.DOUBLE.Create_indexed([n], [1]))],
        "bottom": lambda: [MPI.BOTTOM, 1, made(MPI.DOUBLE.Create_hindexed([n], [MPI.Get_address(room)]))],
        "resized": lambda: [room, n, made(MPI.DOUBLE.Create_resized(0, 16))],
        "letters": lambda: [room.view("S1")[: 8 * n], MPI.CHAR],
        "dlpack": lambda: Carrier(room[:n]),
        "vector in bytes": lambda: [bytearray(8 * n), 1, made(MPI.DOUBLE.Create_vector(n, 1, 1))],
    }[odd]()
    even_one = values.view(np.uint8) if odd == "letters" else values
    for call in (lambda spec: ours.Bcast(spec, 0), lambda spec: ours.Ibcast(spec, 0).Wait()):
        room[:] = 0
        call(odd_one if comm.rank == comm.size - 1 and comm.size > 1 else even_one)
        if comm.rank == comm.size - 1 and comm.size > 1:
            got = np.frombuffer(odd_one[0]) if odd == "vector in bytes" else room
            assert sorted(got[got != 0]) == [1, 2, 3, 4, 5]
    for kind in types:
        kind.Free()


def test_one_rank_may_sum_in_an_odd_way(comm, forced):
    MPI = load_mpi()
    ours = forced()
    for values in (np.arange(6) + 1j, np.arange(6.0).reshape(2, 3)):
        source, total = values.copy(order="F"), np.zeros_like(values, order="F")
        odd = comm.rank == 0
        ours.Allreduce(memoryview(source) if odd else source, memoryview(total) if odd else total)
        assert (total == comm.size * values).all()
    nothing = np.zeros(0)
    ours.Allreduce([None, 0, MPI.DOUBLE] if comm.rank == 0 else nothing, array("d") if comm.rank == 1 else nothing)


def test_what_must_not_be_written_is_not(comm, forced):
    MPI = load_mpi()
    ours, frozen = forced(), bytes(64)
    kind = MPI.DOUBLE.Create_vector(4, 1, 2).Commit()
    if comm.rank == 0:
        ours.Bcast(np.ones(4), 0)
    else:
        with pytest.raises(BufferError, match="not writable"):
            ours.Bcast([frozen, 1, kind], 0)
    assert frozen == bytes(64)
    kind.Free()


def test_free_lets_requests_come_to_their_end(comm, forced):
    MPI = load_mpi()
    forced("ring")
    from mpiddl.communicator import Communicator

    ours = Communicator(comm.Dup())
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


def test_copies_and_duplicates(comm, forced, tmp_path):
    from mpiddl.communicator import Communicator

    MPI = load_mpi()
    for one in (Communicator(MPI.COMM_WORLD), Communicator(MPI.COMM_SELF)):
        for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert type(other) is Communicator and other == one
    handle = comm.Dup()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = Communicator(handle, table=tmp_path / "none.toml")
    for made in (ours.Dup(), ours.Split(), ours.Clone()):
        assert made._table == tmp_path / "none.toml"
        made.Free()
    ours.Free()


@pytest.mark.parametrize("nothing", ["None", "COMM_NULL", "3"])
def test_what_is_no_communicator(comm, nothing):
    from mpiddl.communicator import Communicator

    given = {"None": None, "COMM_NULL": load_mpi().COMM_NULL, "3": 3}[nothing]
    with pytest.raises((TypeError, CommError)):
        Communicator(given)


def test_a_collective_cannot_be_cancelled(comm, forced):
    MPI = load_mpi()
    ours, x = forced("ring"), np.ones(1000)
    request = ours.Iallreduce(MPI.IN_PLACE, x)
    if comm.size > 1:
        with pytest.raises(MPI.Exception):
            request.Cancel()
    request.Wait()


def test_in_place_gathers_and_scatters(comm, forced):
    MPI = load_mpi()
    ours = forced()
    everybody = np.zeros((comm.size, 3), np.int64)
    everybody[comm.rank] = comm.rank + 1
    ours.Allgather(MPI.IN_PLACE, everybody)
    assert (everybody == np.arange(1, comm.size + 1)[:, None]).all()
    data = np.arange(2.0 * comm.size)
    part = np.zeros(2)
    ours.Reduce_scatter_block(data, part)
    assert (part == comm.size * data[2 * comm.rank : 2 * comm.rank + 2]).all()
    ours.Reduce_scatter_block(MPI.IN_PLACE, data)
    assert (data[:2] == part).all()
    ours.Barrier()


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


@pytest.mark.parametrize("way", ["Wait", "Test", "Waitall", "wait", "Waitany"])
def test_requests_mix_with_the_librarys(comm, forced, way):
    MPI = load_mpi()
    ours = forced("ring")
    source, total, cast = np.full(5000, comm.rank + 1.0), np.zeros(5000), np.full(3000, float(comm.rank))
    there, here = (comm.rank + 1) % comm.size, np.zeros(1)
    requests = [ours.Iallreduce(source, total), ours.Ibcast(cast, 0), comm.Irecv(here, MPI.ANY_SOURCE, 5),
                comm.Isend(np.array([7.0]), there, 5)]
    if way == "Waitall":
        MPI.Request.Waitall(requests)
    elif way == "Waitany":
        for _ in requests:
            MPI.Request.Waitany(requests)
    elif way == "Test":
        while sum(request == MPI.REQUEST_NULL or request.Test() for request in requests) < len(requests):
            pass
    else:
        for request in requests:
            getattr(request, way)()
    assert (total == comm.size * (comm.size + 1) / 2).all() and not cast.any() and here[0] == 7
    assert all(request == MPI.REQUEST_NULL for request in requests)


def test_what_comes_from_one_is_one(comm, forced):
    from mpiddl.communicator import CartCommunicator, Communicator

    MPI = load_mpi()
    ours = forced()
    group = ours.Get_group()
    some = [ours.Dup(), ours.Split(comm.rank % 2), ours.Create(group), ours.Create_group(group), ours.Clone(),
            ours.Split_type(MPI.COMM_TYPE_SHARED)]
    for one in some:
        assert type(one) is Communicator
        x = np.ones(100)
        one.Allreduce(MPI.IN_PLACE, x)
        assert x[0] == one.size
        one.Free()
        assert one == MPI.COMM_NULL
    cart = ours.Create_cart([comm.size])
    assert type(cart) is CartCommunicator and cart.Get_coords(comm.rank) == [comm.rank]
    line = cart.Sub([True])
    assert type(line) is CartCommunicator
    line.Free()
    cart.Free()
    group.Free()
    assert ours.Split(MPI.UNDEFINED) == MPI.COMM_NULL


def test_a_handle_freed_by_somebody_else_is_said(comm, forced):
    from mpiddl.communicator import Communicator

    forced()
    handle = comm.Dup()
    ours, other = Communicator(handle), Communicator(handle)
    x = np.ones(10)
    ours.Allreduce(load_mpi().IN_PLACE, x)
    assert ours._private is other._private
    handle.Free()
    if comm.size == 1:
        return
    MPI, many = load_mpi(), np.ones(10 * comm.size)
    for call in (
        lambda: ours.Allreduce(MPI.IN_PLACE, x), lambda: other.Bcast(x), lambda: ours.Allgather(x, many), ours.Barrier,
        lambda: ours.Reduce_scatter_block(many, x), lambda: ours.Reduce_scatter_block(many, x, op=MPI.LAND),
        lambda: ours.Allreduce(x.astype("i"), x.astype("i"), op=MPI.LAND), lambda: ours.Reduce(x, x.copy(), op=MPI.LAND),
        lambda: ours.Iallreduce(x, x.copy(), op=MPI.LAND), lambda: ours.Ibcast([x, 1, MPI.DATATYPE_NULL]),
    ):  # fmt: skip
        with pytest.raises(CommError, match="freed by somebody else"):
            call()


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

    monkeypatch.setattr(choice.rule, "steps", lambda topology, call: ((4096, "two-step"),) if call == "allreduce" else ())
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
        with pytest.raises(CommError, match="freed by somebody else"):
            one.Allreduce(load_mpi().IN_PLACE, np.ones(3))
        with pytest.raises(CommError, match="freed by somebody else"):
            one.Bcast(np.ones(3))


def test_why(comm, forced):
    from mpiddl.communicator import Communicator

    ours = forced("ring")
    told = ours.why("allreduce", 1 << 20)
    if comm.size > 1:
        assert told.algorithm == "ring" and "built-in rule" in str(told)
    with pytest.raises(ValueError, match="call: got 'sum', wanted one of allreduce"):
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

    ours, x = forced(), np.ones(1000)
    if comm.size > 1:
        monkeypatch.setattr(ours._private, "threads", False)
    request = ours.Iallreduce(load_mpi().IN_PLACE, x)
    assert not isinstance(request, CollectiveRequest)
    request.Wait()
    assert x[0] == comm.size


def test_only_named_ones_are_pickled(comm, forced):
    ours = forced()
    with pytest.raises(ValueError, match="cannot serialize"):
        pickle.dumps(ours)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("kind", [np.matrix, np.ma.array, np.ma.masked_less])
def test_arrays_of_other_classes_are_what_lies_in_memory(comm, forced, kind):
    n, made = 30 * comm.size, kind if kind is not np.ma.masked_less else lambda values: np.ma.masked_less(values, 9)
    mine = slice(30 * comm.rank, 30 * (comm.rank + 1))
    for name in ("two-step", "ring"):
        ours, source = forced(name), np.arange(float(n)) + comm.rank
        wanted, total, part, block = np.zeros(n), made(np.zeros(n)), made(np.zeros(30)), made(source[mine])
        comm.Allreduce(source, wanted)
        ours.Allreduce(made(source), total)
        assert (_plain(total) == wanted).all()
        ours.Reduce(made(source), total if comm.rank == 0 else None)
        assert comm.rank or (_plain(total) == wanted).all()
        ours.Reduce_scatter_block(made(source), part)
        assert (_plain(part) == wanted[mine]).all()
        ours.Allgather(block, total)
        assert (_plain(total).reshape(comm.size, 30)[comm.rank] == _plain(block)).all()
        ours.Bcast(total if comm.rank else made(wanted))
        assert comm.rank == 0 or (_plain(total) == wanted).all()


def _plain(values):
    return values.view(np.ndarray).reshape(-1)


@pytest.mark.parametrize("root", [np.array(0), np.int8(0), False, 0.0])
def test_a_root_is_whatever_mpi4py_takes_for_a_number(comm, forced, root):
    ours, x, total = forced(), np.full(50, comm.rank + 1.0), np.zeros(50)
    ours.Bcast(x, root)
    ours.Ibcast(x, root).Wait()
    ours.Reduce(x, total, root=root)
    assert (x == 1).all() and (comm.rank != 0 or (total == comm.size).all())


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
def test_packing_takes_nobodys_messages(comm, forced):
    """Neither those that a program waits for on COMM_SELF, nor those of another thread."""
    MPI = load_mpi()
    ours = forced()
    kinds = [MPI.DOUBLE.Create_vector(n, 1, 2).Commit() for n in (3000, 6000)]
    room = np.zeros(10_000)
    waiting = MPI.COMM_SELF.Irecv(room, MPI.ANY_SOURCE, MPI.ANY_TAG)
    packed = payload([np.full(6000, 5.0), 1, kinds[0]])
    assert packed.array.nbytes == 24_000 and not waiting.Test()
    waiting.Cancel()
    waiting.Wait()
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        with ThreadPoolExecutor(2) as pool:
            assert all(pool.map(_packs, kinds, (1.0, 2.0)))
    x = np.full(6000, comm.rank + 1.0)
    ours.Bcast([x, 1, kinds[0]], 1)
    assert (x[::2] == 2).all()
    for kind in kinds:
        kind.Free()


def _packs(kind, value):
    """Whether what is packed, and put back, is what was given, each time."""
    n = kind.Get_size() // 8
    for number in range(200):
        x = np.full(2 * n, value + number)
        packed = payload([x, 1, kind])
        if packed.array.nbytes != 8 * n or (packed.array.view(float) != value + number).any():
            return False
        packed.array.view(float)[:] = -value
        packed.put_back()
        if (x[::2] != -value).any() or (x[1::2] != value + number).any():
            return False
    return True


@pytest.mark.mpi(min_size=2)
def test_a_warning_that_is_an_error_is_all_ranks(comm, tmp_path):
    from mpiddl.communicator import Communicator

    handle = comm.Dup()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning if comm.rank == 0 else CommError, match="there is no table"):
            Communicator(handle, table=tmp_path / "none.toml")
    handle.Free()


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
