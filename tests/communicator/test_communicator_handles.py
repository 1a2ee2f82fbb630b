"""`mpiddl.Communicator`: its handle, the objects and duplicates that share or follow it, when they are prepared and freed."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest

from mpiddl.errors import CommError
from mpiddl.transport.start import load_mpi

pytestmark = pytest.mark.mpi


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
    later, informed = ours.Idup(), ours.Idup_with_info(MPI.INFO_ENV)
    MPI.Request.Waitall([later[1], informed[1]])
    for made in (ours.Dup(), ours.Split(), ours.Clone(), ours.Dup_with_info(MPI.INFO_ENV), later[0], informed[0]):
        assert type(made) is Communicator and made._table == tmp_path / "none.toml"
        made.Free()
    ours.Free()


@pytest.mark.parametrize("name", ["COMM_WORLD", "COMM_SELF"])
def test_where_mpi_refuses_to_free_ours_goes_on(comm, name):
    from mpiddl.communicator import Communicator

    MPI = load_mpi()
    handle = getattr(MPI, name)
    ours, total = Communicator(handle), np.zeros(100_000)
    before = ours._private
    # MPICH disconnects COMM_WORLD.
    ways = ("Free", "Disconnect") if MPI.Get_library_version().startswith("Open MPI") else ("Free",)
    for way in ways:
        for one in (ours, handle):
            with pytest.raises(MPI.Exception):
                getattr(one, way)()
            assert ours._private is before
            ours.Allreduce(np.ones(100_000), total)
            assert (total == ours.size).all()


@pytest.mark.parametrize("given", [(), (None,), ("COMM_NULL",)])
def test_a_null_communicator_is_one_as_mpi4pys(comm, given):
    from mpiddl.communicator import Communicator

    MPI = load_mpi()
    null = Communicator(*(MPI.COMM_NULL if name else None for name in given))
    for one in (null, type(null)(), copy.copy(null)):
        assert one == MPI.COMM_NULL and not one and type(one) is Communicator
        for call in ("Get_size", "Free", "Barrier"):
            with pytest.raises(MPI.Exception):
                getattr(one, call)()
        with pytest.raises(MPI.Exception):
            one.Allreduce(np.ones(100_000), np.ones(100_000))
        with pytest.raises(MPI.Exception):
            one.Iallreduce(np.ones(100_000), np.ones(100_000))


def test_what_is_no_communicator(comm):
    from mpiddl.communicator import Communicator

    with pytest.raises(TypeError, match="comm"):
        Communicator(3)


def test_a_handle_as_a_number_gives_the_same_class(comm, forced):
    from mpiddl.communicator import CartCommunicator, Communicator

    MPI = load_mpi()
    ours, cart = forced(), Communicator(comm).Create_cart([comm.size])
    for one, kind in ((ours, Communicator), (cart, CartCommunicator)):
        for made in (type(one).f2py(one.py2f()), one.fromint(one.toint()), one.fromhandle(one.handle)):
            assert type(made) is kind and made == one
    assert ours.f2py(MPI.COMM_NULL.py2f()) == MPI.COMM_NULL
    cart.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.limit(60)
def test_ranks_may_use_different_objects_on_one_handle(comm, tmp_path):
    """One of them used to send its calls to the library, the others theirs to mpiddl, and all waited for ever."""
    from mpiddl.communicator import Communicator

    MPI = load_mpi()
    early = pickle.loads(pickle.dumps(Communicator(MPI.COMM_WORLD)))
    world = Communicator(MPI.COMM_WORLD, algorithms={"allreduce": "ring", "bcast": "binomial"})
    late, plain = pickle.loads(pickle.dumps(world)), pickle.loads(pickle.dumps(early))
    dup = Communicator(MPI.COMM_WORLD).Dup()
    sister = Communicator(dup)
    for pair in ((world, late), (early, plain), (dup, sister), (sister, sister.f2py(sister.py2f()))):
        for n in (10, 100_000):
            one, ones, total = pair[comm.rank % 2], np.ones(n), np.zeros(n)
            assert comm.allgather(str(one.why("allreduce", 8 * n))) == [str(one.why("allreduce", 8 * n))] * comm.size
            one.Iallreduce(ones, total).Wait()  # mpi4py itself keeps no array alive
            assert (total == comm.size).all()
            one.Allreduce(np.ones(n), total)
            one.Ibcast(total, 1).Wait()
            assert (total == comm.size).all()
    assert late._algorithms == world._algorithms
    dup.Free()
    if world._own._progress is not None:  # COMM_WORLD is never freed, and its thread stays
        world._own._progress.Free()
        world._own._progress = None


@pytest.mark.mpi(min_size=2)
@pytest.mark.limit(60)
@pytest.mark.parametrize("number", ["handle", "toint", "py2f"])
@pytest.mark.parametrize("early", [True, False])
def test_calls_of_all_objects_on_a_handle_count_together(comm, number, early):
    """One rank uses a second object from the number of the handle, made before or after the first calls. Each object used to
    count its own calls, so that ranks began to use our algorithms at different calls, which deadlocked."""
    from mpiddl.communicator import Communicator

    ours, n = Communicator(comm.Dup()), 1 << 16
    late = ours.Dup()
    late._enough = 4 * 8 * n
    x, total, ready, used = np.ones(n), np.zeros(n), [], late
    for k in range(6):
        if comm.rank == 1 and k == (0 if early else 2):
            given = getattr(late, number)
            used = {"handle": late.fromhandle, "toint": late.fromint, "py2f": late.f2py}[number](
                given if number == "handle" else given())
        used.Allreduce(x, total)
        assert (total == comm.size).all()
        ready.append("Prepare" not in str(used.why("allreduce", 8 * n)))
    assert ready == [False] * 3 + [True] * 3
    late.Free()
    ours.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.limit(60)
@pytest.mark.parametrize("asked", [{"allreduce": "ring"}, {"allreduce": "library"}, {"barrier": "dissemination"}])
@pytest.mark.parametrize("another", [lambda one: one.fromint(one.toint()), lambda one: one.fromhandle(one.handle)])
@pytest.mark.parametrize("prepared", [True, False])
def test_another_object_on_a_handle_has_its_algorithms(comm, tmp_path, asked, another, prepared):
    """It had none, so that its rank took other algorithms than the others, or prepared at another call."""
    from mpiddl.communicator import Communicator

    path = tmp_path / "none.toml"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = Communicator(comm.Dup(), algorithms=asked, table=path)
    one = ours if prepared else ours.Dup()
    used, total = another(one) if comm.rank else one, np.zeros(1 << 17)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            used.Allreduce(np.ones(1 << 17), total)
            used.Barrier()
        assert (total == comm.size).all()
    assert (used._algorithms, used._table) == (asked, path)
    made = used.Dup()
    assert (made._algorithms, made._table, made._enough) == (asked, path, one.Dup()._enough)
    one.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.limit(60)
@pytest.mark.parametrize("call", ["Allreduce", "Reduce", "Reduce_scatter_block", "Allgather"])
@pytest.mark.parametrize("asked", [True, False])
def test_a_call_that_is_refused_on_one_rank_does_not_count(comm, call, asked):
    """It used to count there, and this rank began to use our algorithms one call before the others."""
    from mpiddl.communicator import Communicator

    MPI = load_mpi()
    ours, n = Communicator(comm.Dup()), 1 << 14
    late = ours.Dup()
    late._enough = 4 * 8 * n * comm.size
    if asked:
        assert late.handle
    long, part = np.ones(n * comm.size), np.ones(n)
    sent, result = {"Allgather": (part, long), "Reduce_scatter_block": (long, part)}.get(call, (long, long.copy()))
    if comm.rank == 0:
        with pytest.raises((ValueError, MPI.Exception)):
            getattr(late, call)(*((sent, result[:-1]) if call == "Allgather" else (sent[:-1], result)))
    ready = []
    for _ in range(6):
        getattr(late, call)(sent, result)
        ready.append("Prepare" not in str(late.why("allreduce", 8 * n)))
    assert ready == [False] * 3 + [True] * 3
    late.Free()
    ours.Free()


@pytest.mark.parametrize("ask", ["late.handle", "late.toint()", "late.py2f()"])
def test_the_number_of_a_handle_that_was_freed_is_what_mpi4py_says(comm, ask):
    from mpiddl.communicator import Communicator

    MPI = load_mpi()
    ours = Communicator(comm.Dup())
    late = ours.Dup()
    plain = MPI.Intracomm(late)
    assert eval(ask, {"late": late}) == eval(ask, {"late": plain})
    late.Free()
    late = ours.Dup()
    plain = MPI.Intracomm(late)
    MPI.Intracomm(late).Free()
    if not MPI.Get_library_version().startswith("Open MPI"):  # whose numbers are addresses
        assert eval(ask, {"late": late}) == eval(ask, {"late": plain})
    ours.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.limit(60)
@pytest.mark.parametrize("how", ["plain arrays", "other forms", "one rank has two objects"])
def test_a_duplicate_is_prepared_when_it_is_worth_it(comm, how):
    from mpiddl.communicator import Communicator

    MPI = load_mpi()
    ours = Communicator(comm.Dup())
    late, n = ours.Dup(), 1 << 17
    late._enough = 10 * 8 * n
    x, total, ready = np.ones(2 * n), np.zeros(2 * n), []
    for _ in range(12):
        if how == "one rank has two objects" and comm.rank == 0:
            other = late.f2py(late.py2f())
        late.Iallreduce(x, total).Wait()  # these count nowhere: they must not wait for others
        late.Bcast(np.ones(1000))
        if how == "other forms" and comm.rank == 0:
            late.Allreduce([x, n, MPI.DOUBLE], [total, n, MPI.DOUBLE])
        else:
            late.Allreduce(x[:n], total[:n])
        assert (total[:n] == comm.size).all()
        ready.append("Prepare" not in str(late.why("allreduce", 8 * n)))
    assert ready == [False] * 9 + [True] * 3
    if how == "one rank has two objects":
        (other if comm.rank == 0 else late).Allreduce(x, total)
        assert (total == comm.size).all()
    late.Free()
    ours.Free()


@pytest.mark.mpi(min_size=2)
def test_short_lived_communicators_are_never_prepared(comm, monkeypatch):
    from mpiddl.communicator import Communicator
    from mpiddl.communicator.private import Private, keyval

    def prepare(*args):
        raise AssertionError

    ours = Communicator(comm.Dup())
    monkeypatch.setattr(Private, "prepare", prepare)
    for make in (ours.Dup, ours.Split, ours.Clone):
        for n in (1500, 8192, 131_072):
            x, y = np.ones(n), np.zeros(n)
            made = make()
            made.Allreduce(x, y)
            made.Iallreduce(x, y).Wait()
            made.Bcast(y)
            assert (y == comm.size).all() and made.Get_attr(keyval()) is None
            made.Free()
    ours.Free()


@pytest.mark.mpi(min_size=2)
def test_parts_of_several_nodes_are_prepared_sooner(comm, monkeypatch):
    from mpiddl.communicator import Communicator
    from mpiddl.communicator.private import ENOUGH_BYTES, ENOUGH_BYTES_ACROSS
    from mpiddl.transport.mpi import MpiComm

    near = Communicator(comm.Dup())
    monkeypatch.setattr(MpiComm, "nodes", lambda link: list(range(link.size)))
    far = Communicator(comm.Dup())
    assert far.Dup().Dup()._enough == ENOUGH_BYTES_ACROSS < near.Split()._enough == ENOUGH_BYTES
    x = np.ones(ENOUGH_BYTES_ACROSS // 8)
    for one, ready in ((near.Dup(), False), (far.Dup(), True)):
        one.Allreduce(x, x.copy())
        assert ("Prepare" not in str(one.why("allreduce", x.nbytes))) == ready


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
        with pytest.raises(CommError, match="whose MPI handle was freed"):
            call()
