"""`mpiddl.Communicator`: however a message lies in memory and is written down, on all ranks or on one."""

from __future__ import annotations

import pickle
from array import array
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mpiddl.collectives.at_once import AtOnce
from mpiddl.communicator import Communicator
from mpiddl.transport.buffers import payload
from mpiddl.transport.start import load_mpi

pytestmark = pytest.mark.mpi


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


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int8", "uint16", "complex64"])
@pytest.mark.parametrize("nbytes", [8, 40_000, 400_000])
def test_one_rank_may_sum_another_kind_of_array(comm, dtype, nbytes):
    """Unpickled arrays have a dtype object of their own; the built-in rule compares these objects."""
    MPI = load_mpi()
    ours = Communicator(comm.Dup())
    ours.Prepare()
    values = (np.arange(nbytes // np.dtype(dtype).itemsize) % 10).astype(dtype)
    odd, own = comm.rank == 0, pickle.loads(pickle.dumps(values))
    wanted = values * np.dtype(dtype).type(comm.size)
    assert own.dtype is not values.dtype
    for source, total, op in (
        (own, pickle.loads(pickle.dumps(values)), MPI.SUM), (values, values.copy(), MPI.Op(MPI.SUM)),
        (values, memoryview(values.copy()), MPI.SUM), (values, [values.copy(), values.size], MPI.SUM),
        (MPI.IN_PLACE, own.copy(), MPI.SUM), (values[:], np.tile(values, 2)[: values.size], MPI.SUM),
        (np.stack([values, values])[1], values.reshape(1, -1).copy(), MPI.SUM),
    ):  # fmt: skip
        plain = np.zeros_like(values)
        ours.Allreduce(source if odd else values, total if odd else plain, op if odd else MPI.SUM)
        got = np.asarray(total[0] if isinstance(total, list) else total).reshape(-1) if odd else plain
        np.testing.assert_array_equal(got, wanted)
    ours.Free()


def test_arrays_that_overlap_or_cannot_be_written_are_mpi4pys(comm, monkeypatch):
    MPI, ours, memory, runs = load_mpi(), Communicator(comm.Dup()), np.ones(20_000), []
    ours.Prepare()
    with monkeypatch.context() as patch:
        patch.setattr(AtOnce, "run", lambda self, arguments: runs.append(arguments))
        for source, total in ((memory[:10_000], memory[5_000:15_000]), (memory, memory), (memory[:10_000], memory[:10_000])):
            assert not ours._allreduce(source, total, MPI.SUM) and not runs  # MPICH would end the process
        ours.Allreduce(memory[:10_000], memory[10_000:])
        ours.Allreduce(MPI.IN_PLACE, memory)
        assert len(runs) == (2 if comm.size > 1 else 0)
    frozen = np.ones(10_000)
    frozen.flags.writeable = False
    with pytest.raises(BufferError, match="not writable"):
        ours.Allreduce(memory[:10_000].copy(), frozen)
    total = np.zeros(10_000)
    ours.Allreduce(frozen, total)  # only read
    assert (total == comm.size).all()
    ours.Free()


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
