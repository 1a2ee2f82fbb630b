"""Calls that cannot be: told by name on every rank, none of which waits for the others; afterwards all goes on."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddl import collectives
from mpiddl.collectives import TwoStep, allgather, allreduce, broadcast, iallreduce, progress, reduce, reduce_scatter
from mpiddl.errors import CommError, MismatchError, ShapeError, UsageError
from mpiddl.layout import block_bounds
from mpiddl.node.arena import Arena
from mpiddl.transport import virtual
from mpiddl.transport.base import IN_PLACE, MAX, MIN, PROD, SUM

pytestmark = pytest.mark.no_mpi


def locked(n):
    array = np.zeros(n)
    array.flags.writeable = False
    return array


ROOM = np.zeros(20)
ODD = np.zeros(33, np.uint8)[1:].view(np.float64)
NO_ARITHMETIC = [np.zeros(4, dtype) for dtype in ("?", "e", ">f8", "O", "S3", "M8[s]")]

ALLREDUCE = {
    "no array": ([1.0], np.zeros(1), "sendbuf: got list, expected a numpy array"),
    "nothing": (np.zeros(1), None, "recvbuf: got NoneType, expected a numpy array"),
    "gaps": (np.zeros(8)[::2], np.zeros(4), "sendbuf: .* not contiguous, .* np.ascontiguousarray"),
    "columns first": (IN_PLACE, np.zeros((3, 4), order="F"), "recvbuf: .* not contiguous"),
    "boundaries": (ODD, np.zeros(4), r"sendbuf: .* not aligned, .* array\.copy\(\)"),
    "locked": (np.zeros(4), locked(4), "recvbuf: got a read-only array"),
    "locked in place": (IN_PLACE, locked(4), "recvbuf: got a read-only array"),
    "sizes": (np.zeros(3), np.zeros(4), "recvbuf: got 4 float64, expected 3 float64, as in sendbuf"),
    "dtypes": (np.zeros(4, "f"), np.zeros(4), "recvbuf: got 4 float64, expected 4 float32"),
    "overlap": (ROOM[:10], ROOM[5:15], "sendbuf and recvbuf: got overlapping buffers, .* IN_PLACE"),
}


@pytest.mark.mpi
@pytest.mark.parametrize("case", ALLREDUCE)
@pytest.mark.parametrize("call", [allreduce, iallreduce, reduce])
def test_buffers(link, case, call):
    source, result, message = ALLREDUCE[case]
    arguments = (link, source, result, SUM, link.rank) if call is reduce else (link, source, result)
    with pytest.raises(ShapeError, match=message):
        call(*arguments)


@pytest.mark.mpi
@pytest.mark.parametrize("array", NO_ARITHMETIC, ids=lambda array: array.dtype.str)
def test_dtypes(link, array):
    calls = {
        "recvbuf": [lambda: allreduce(link, IN_PLACE, array), lambda: reduce_scatter(link, np.zeros(4), array)],
        "sendbuf": [lambda: reduce(link, array, None, root=(link.rank + 1) % link.size), lambda: allgather(link, array, array)],
        "buf": [lambda: broadcast(link, array)],
    }
    calls["sendbuf"] = calls["sendbuf"][link.size == 1 :]  # a lone rank is always the root
    for name, all_of_them in calls.items():
        for call in all_of_them:
            with pytest.raises(UsageError, match=f"{name}: got dtype .* expected an integer, float or complex dtype"):
                call()


def checks(comm):
    """What is the same mistake on every rank: a call, its error and words."""
    data, size = np.zeros(4), comm.size
    begin, end = block_bounds(10, size, comm.rank)
    return [
        (lambda: allreduce(comm, IN_PLACE, data, "SUM"), UsageError, "op: got 'SUM', expected .*: SUM, MIN, MAX, PROD"),
        (lambda: allreduce(comm, IN_PLACE, data, np.add), UsageError, "op: got <ufunc 'add'>"),
        (lambda: reduce_scatter(comm, data, data, None), UsageError, "op: got None"),
        (lambda: allreduce(comm, IN_PLACE, data.astype("D"), MAX), UsageError, "op: got MAX for complex128, expected SUM"),
        (lambda: allreduce(comm, IN_PLACE, data.astype("F"), MIN), UsageError, "op: got MIN for complex64"),
        (lambda: allreduce(comm, IN_PLACE, data, algorithm="best"), UsageError, "algorithm: got 'best', expected one of auto"),
        (lambda: broadcast(comm, data, algorithm="ring"), UsageError, "algorithm: got 'ring', expected one of auto, chain"),
        (lambda: reduce(comm, data, data.copy(), algorithm=""), UsageError, "algorithm: got '', expected one of auto, scatter"),
        (lambda: broadcast(comm, data, size), UsageError, f"root: got {size}, expected a rank from 0 to {size - 1}"),
        (lambda: broadcast(comm, data, -1), UsageError, "root: got -1"),
        (lambda: reduce(comm, data, data.copy(), root=0.0), UsageError, "root: got 0.0"),
        (lambda: reduce(comm, data, None, root=comm.rank), ShapeError, "recvbuf: got NoneType"),
        (lambda: reduce_scatter(comm, np.zeros(10), np.zeros(end - begin + 1)), ShapeError,
         f"recvbuf: got {end - begin + 1} elements of float64, expected {end - begin} .*: the block of rank {comm.rank} "),
        (lambda: allgather(comm, np.zeros(end - begin, "f"), np.zeros(10)), ShapeError, "sendbuf: got .* of float32, expected"),
        (lambda: allgather(comm, (whole := np.zeros(10))[begin:end], whole), ShapeError, "recvbuf: got overlapping buffers"),
        (lambda: broadcast(comm, locked(4), algorithm="scatter"), ShapeError, "buf: got a read-only array"),
    ]  # fmt: skip


def check_mistakes(comm):
    for call, error, words in checks(comm):
        with pytest.raises(error, match=words):
            call()
    total = np.ones(5)
    allreduce(comm, IN_PLACE, total, algorithm="ring")
    assert (total == comm.size).all()


@pytest.mark.mpi
def test_mistakes_of_real_ranks(link):
    check_mistakes(link)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_mistakes_of_virtual_ranks(size):
    virtual.run(size, check_mistakes)


@pytest.mark.mpi
def test_a_root_may_broadcast_what_it_must_not_write(link):
    for algorithm in ("chain", "binomial"):
        for root in range(link.size):
            buf = np.full(9000, 7.0) if link.rank == root else np.zeros(9000)
            buf.flags.writeable = link.rank != root
            broadcast(link, buf, root, algorithm=algorithm)
            assert (buf == 7).all()


def different(comm):
    """Calls in which the last rank differs, that only looking at each other finds."""
    odd, n = comm.rank == comm.size - 1, 6 * comm.size
    data, result = np.zeros(n + odd), np.zeros(n + odd)
    kind = np.zeros(n, "f" if odd else "d")
    begin, end = block_bounds(n + odd, comm.size, comm.rank)
    op, name = (MAX if odd else PROD), ("ring" if odd else "doubling")
    return {
        "allreduce: size": lambda: allreduce(comm, data, result, checked=True),
        "allreduce: dtype": lambda: allreduce(comm, IN_PLACE, kind, checked=True),
        "allreduce: op": lambda: allreduce(comm, IN_PLACE, np.zeros(n), op, checked=True),
        "allreduce: algorithm": lambda: allreduce(comm, IN_PLACE, np.zeros(n), algorithm=name, checked=True),
        "broadcast: root": lambda: broadcast(comm, np.zeros(n), int(odd), checked=True),
        "broadcast: size": lambda: broadcast(comm, data, checked=True),
        "reduce: root": lambda: reduce(comm, np.zeros(n), np.zeros(n), root=int(odd), checked=True),
        "reduce: op": lambda: reduce(comm, np.zeros(n), np.zeros(n), op, checked=True),
        "reduce_scatter: size": lambda: reduce_scatter(comm, data, np.zeros(end - begin), checked=True),
        "allgather: size": lambda: allgather(comm, np.zeros(end - begin), result, checked=True),
        "call": lambda: (broadcast if odd else _reduce_all)(comm, np.zeros(n), checked=True),
    }


def _reduce_all(comm, data, checked):
    allreduce(comm, IN_PLACE, data, checked=checked)


def check_different(comm):
    for words, call in different(comm).items():
        with pytest.raises(MismatchError, match=f"{words}: rank 0 got .*rank {comm.size - 1}.* expected the same"):
            call()
    total = np.ones(5)
    allreduce(comm, IN_PLACE, total, checked=True)
    assert (total == comm.size).all()


@pytest.mark.parametrize("size", [2, 3])
def test_virtual_ranks_that_call_differently(size):
    virtual.run(size, check_different)


@pytest.mark.mpi(min_size=2)
def test_real_ranks_that_call_differently(link):
    check_different(link)


@pytest.mark.mpi
def test_a_freed_communicator(link):
    own, data = link.Dup(), np.zeros(4)
    allreduce(own, IN_PLACE, data)
    own.Free()
    calls = [
        lambda: allreduce(own, IN_PLACE, data),
        lambda: reduce_scatter(own, data, data[:1]),
        lambda: allgather(own, data[:1], data),
        lambda: broadcast(own, data),
        lambda: reduce(own, data, None),
        lambda: collectives.barrier(own),
    ]
    for call in calls:
        with pytest.raises(CommError, match="comm: got a freed communicator, expected"):
            call()


def test_a_library_that_takes_no_calls_from_threads_is_told(link, monkeypatch):
    monkeypatch.setattr(link.transport, "threads", False)
    monkeypatch.setattr(link.transport, "library", lambda: "Serial 1.0")
    with pytest.raises(CommError, match=r"threads: Serial 1\.0 was started without MPI_THREAD_MULTIPLE"), progress(link):
        pass
    monkeypatch.undo()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["allreduce", "reduce_scatter", "broadcast", "plan"])
def test_what_one_rank_alone_gets_wrong_is_everybodys_error_if_checked(link, call):
    wrong = link.rank == link.size - 1
    data = np.zeros(40)[::2] if wrong else np.zeros(20)
    begin, end = block_bounds(20, link.size, link.rank)
    calls = {
        "allreduce": lambda: allreduce(link, IN_PLACE, data, checked=True),
        "reduce_scatter": lambda: reduce_scatter(link, data, np.zeros(end - begin), checked=True),
        "broadcast": lambda: broadcast(link, data, checked=True),
        "plan": lambda: TwoStep(link, -1 if wrong else 5, "f"),
    }
    with pytest.raises(ShapeError, match=rf"rank {link.size - 1} of {link.size}"):
        calls[call]()
    link.Barrier()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": -1}, "size: got -1"),
        ({"size": 2.5}, "size: got 2.5"),
        ({"dtype": "foo"}, "dtype: got 'foo'"),
        ({"segment_bytes": 0}, "segment_bytes: got 0"),
        ({"segment_bytes": "x"}, "segment_bytes: got 'x'"),
        ({"leader": "no"}, "leader: got 'no'"),
    ],
)
def test_plans_that_make_no_sense(link, settings, message):
    with pytest.raises(UsageError, match=message):
        TwoStep(link, **{"size": 4, "dtype": "f", **settings})


@pytest.mark.mpi
def test_what_was_freed_or_is_no_communicator(link):
    plan = TwoStep(link, 4, "f")
    plan.Free()
    for call in (plan, plan.start):
        with pytest.raises(CommError, match=r"TwoStep: got an object after Free\(\)"):
            call()
    with pytest.raises(UsageError, match="comm: got NoneType"):
        allreduce(None, IN_PLACE, np.zeros(3))
    with pytest.raises(ShapeError, match="got a masked array"):
        allreduce(link, IN_PLACE, np.ma.zeros(3))
    with pytest.raises(ShapeError, match="size: got -1"):
        Arena(link).shared("x", -1, "f")
