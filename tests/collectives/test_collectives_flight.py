"""Collectives under way: several at once, in any order, moved by a thread, with ranks that come late and sends that stay."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from harness import queue_transport
from harness.reductions import ALGORITHMS, LAYOUTS, REAL, fold, given, placed

from mpiddl import collectives
from mpiddl.collectives import TwoStep, allreduce, calls, iallreduce, ibarrier, ibroadcast, ireduce, ireduce_scatter, progress
from mpiddl.collectives.allreduce_ring import allreduce_ring
from mpiddl.collectives.reduce_scatter_ring import reduce_scatter_ring
from mpiddl.collectives.wire import wire
from mpiddl.errors import CommError
from mpiddl.layout import block_bounds
from mpiddl.progress.started import Started, go_on, run
from mpiddl.progress.thread import Progress
from mpiddl.transport import virtual
from mpiddl.transport.base import IN_PLACE, MAX, SUM
from mpiddl.transport.start import load_mpi
from mpiddl.transport.virtual import VirtualRequest, VirtualTransport

pytestmark = pytest.mark.no_mpi

SPREAD = ["2", "3", "2+1", "2+2 in turn", "2+3", "1+1+1+1+1+1"]


@pytest.fixture
def staying(monkeypatch):
    """A message leaves the sender's buffer no sooner than the receiver has asked for it: what MPI may do with long ones."""
    mail = {}

    def isend(self, buf, dest, tag):
        sent, asked, done = mail.setdefault((self._context, self.rank, dest, tag), ([], [], [0]))
        sent.append(buf)
        self.world.events += 1
        number = len(sent)
        since = lambda: once(len(asked) >= number)  # noqa: E731
        return VirtualRequest(self, since, f"{dest} to ask", lambda: carry(sent, asked, done, number))

    def irecv(self, buf, source, tag):
        sent, asked, done = mail.setdefault((self._context, source, self.rank, tag), ([], [], [0]))
        asked.append(buf)
        self.world.events += 1
        number = len(asked)
        since = lambda: once(len(sent) >= number)  # noqa: E731
        return VirtualRequest(self, since, f"word of {source}", lambda: carry(sent, asked, done, number))

    def once(ready):
        return 0.0 if ready else None

    def carry(sent, asked, done, number):
        for turn in range(done[0], number):
            assert sent[turn].dtype == asked[turn].dtype
            asked[turn].reshape(-1)[...] = sent[turn].reshape(-1)
        done[0] = max(done[0], number)

    monkeypatch.setattr(VirtualTransport, "isend", isend)
    monkeypatch.setattr(VirtualTransport, "irecv", irecv)


def be_late(comm, late):
    """The others have had many turns before this rank comes."""
    for _ in range(200 if comm.rank == late else 0):
        comm.transport.block(lambda: 0.0, "its next turn")


def start_all(comm, round_number=0):
    """One of each collective; pairs of request and check."""
    rank, size, n = comm.rank, comm.size, 5 * comm.size + 2
    started = []
    for number, algorithm in enumerate(ALGORITHMS):
        n += 1
        mine, total = given(rank, n, "d") * (1 + round_number), np.empty(n)
        op = SUM if number % 2 else MAX
        request = iallreduce(comm, mine, total, op, algorithm=algorithm)
        started.append((request, total, fold(size, n, "d", op) * (1 + round_number)))
    begin, end = block_bounds(n, size, rank)
    for root, algorithm in enumerate(calls.BROADCAST):
        buf = given(root % size if rank == root % size else 99, n, "f")
        started.append((ibroadcast(comm, buf, root % size, algorithm=algorithm), buf, given(root % size, n, "f")))
    for root, algorithm in enumerate(calls.REDUCE):
        total = np.zeros(n)
        request = ireduce(comm, given(rank, n, "d"), total, root=root % size, algorithm=algorithm)
        started.append((request, total, fold(size, n, "d", SUM) if rank == root % size else np.zeros(n)))
    block, everything = np.empty(end - begin), np.empty(n)
    started.append((ireduce_scatter(comm, given(rank, n, "d"), block), block, fold(size, n, "d", SUM)[begin:end]))
    request = collectives.iallgather(comm, np.arange(n, dtype="d")[begin:end].copy(), everything)
    started.append((request, everything, np.arange(n, dtype="d")))
    return [*started, (ibarrier(comm), np.empty(0), np.empty(0))]


ORDERS = {
    "as started": lambda rank: 1,
    "the last one first": lambda rank: -1,
    "another on each rank": lambda rank: (1, -1)[rank % 2],
}

WAYS = [*((order, "Wait") for order in ORDERS), *(("another on each rank", how) for how in ("Test", "Test one"))]


def check_flight(comm, order, how="Wait", late=None):
    for round_number in range(2):
        if late is not None:
            be_late(comm, late)
        started = start_all(comm, round_number)
        left = started[:: ORDERS[order](comm.rank)]
        while left:
            for entry in list(left):
                if how == "Wait":
                    entry[0].Wait()
                while how == "Test one" and not entry[0].Test():
                    pass
                if how != "Test" or entry[0].Test():
                    left.remove(entry)
        for _, found, wanted in started:
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("order", "how"), WAYS)
@pytest.mark.parametrize("layout", [*SPREAD, "4+4+4"])
def test_all_at_once(layout, order, how):
    nodes = LAYOUTS[layout]
    virtual.run(len(nodes), lambda comm: check_flight(comm, order, how), nodes)


@pytest.mark.parametrize(("order", "how"), WAYS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_at_once_on_a_transport_that_only_moves_messages(size, order, how):
    queue_transport.run(size, lambda comm: check_flight(comm, order, how))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", SPREAD)
def test_all_at_once_where_sends_stay_and_a_rank_is_late(layout, order, staying):
    nodes = LAYOUTS[layout]
    for late in {0, len(nodes) // 2, len(nodes) - 1}:
        virtual.run(len(nodes), lambda comm, late=late: check_flight(comm, order, "Wait", late), nodes)


@pytest.mark.parametrize("size", [3, 4, 5, 7])
def test_short_segments_and_empty_ones_where_sends_stay_and_a_rank_is_late(size, staying):
    def program(comm, n, late):
        begin, end = block_bounds(n, size, comm.rank)
        block, total, way = np.empty(end - begin), given(comm.rank, n, "d"), wire(comm)
        be_late(comm, late)
        for steps in (reduce_scatter_ring(way, given(comm.rank, n, "d"), block, SUM, segment_bytes=8),
                      allreduce_ring(way, total, total, SUM, segment_bytes=8)):  # fmt: skip
            for request in steps:
                request.Wait()
        np.testing.assert_array_equal(total, fold(size, n, "d", SUM))
        np.testing.assert_array_equal(block, total[begin:end])

    for n in (1, size - 2, size - 1, size, 2 * size + 1):
        for late in {0, size // 2, size - 1}:
            virtual.run(size, lambda comm, n=n, late=late: program(comm, n, late))


@pytest.mark.mpi
@pytest.mark.parametrize(("order", "how"), WAYS)
@pytest.mark.parametrize("layout", REAL)
def test_all_at_once_on_real_ranks(link, layout, order, how):
    check_flight(placed(link, layout), order, how)


def check_plans(comm, late):
    """Two plans on the same links: their messages must not be taken for each other's."""
    plans = [TwoStep(comm, n, "d", leader=leader) for n, leader in ((40, False), (40, True), (41, False))]
    be_late(comm, late)
    for plan in plans:
        plan.input[:] = given(comm.rank, plan.input.size, "d")
    requests = [plan.start() for plan in plans]
    for request in requests[::-1]:
        request.Wait()
    for plan in plans:
        np.testing.assert_array_equal(plan.result, fold(comm.size, plan.input.size, "d", SUM))
    comm.Barrier()


@pytest.mark.parametrize("layout", SPREAD)
def test_several_plans_at_once_whoever_is_late(layout):
    nodes = LAYOUTS[layout]
    for late in range(len(nodes)):
        virtual.run(len(nodes), lambda comm, late=late: check_plans(comm, late), nodes)


@pytest.mark.mpi
@pytest.mark.parametrize("layout", REAL)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_progress_thread_completes_them_while_the_main_thread_makes_no_call(link, layout, algorithm):
    comm = placed(link, layout)
    mine, total = given(comm.rank, 50_000, "d"), np.empty(50_000)
    with progress(comm) as moving:
        request = moving.on(iallreduce(comm, mine, total, algorithm=algorithm))
        over = threading.Event()
        request.then(over.set)
        over.wait()  # without moving it
        np.testing.assert_array_equal(total, fold(comm.size, 50_000, "d", SUM))
        request.Wait()
    assert not any(thread.name == "mpiddl progress" for thread in threading.enumerate())


@pytest.mark.mpi
@pytest.mark.parametrize("layout", ["one", "halves"])
def test_a_progress_thread_beside_a_main_thread_that_waits(link, layout):
    comm = placed(link, layout)
    with progress(comm) as moving:
        for round_number in range(2):
            started = start_all(comm, round_number)
            for request, _, _ in started:
                moving.on(request)
            total = np.array([1.0])
            allreduce(comm, IN_PLACE, total, algorithm="ring")
            assert total == comm.size
            for request, found, wanted in started[::-1]:
                request.Wait()
                np.testing.assert_array_equal(found, wanted)


def check_two_communicators(comm):
    """Started in the same order, waited for in another one on each rank."""
    comms = [comm, comm.Dup(), comm.Split(0, comm.rank)]
    for algorithm in ALGORITHMS:
        n = 20_000
        totals = [np.empty(n) for _ in comms]
        mine = given(comm.rank, n, "d")
        requests = [iallreduce(on, mine, total, algorithm=algorithm) for on, total in zip(comms, totals, strict=True)]
        for request in requests[:: (1, -1)[comm.rank % 2]]:
            request.Wait()
        for total in totals:
            np.testing.assert_array_equal(total, fold(comm.size, n, "d", SUM))
    assert not comm.started


@pytest.mark.parametrize("layout", SPREAD)
def test_two_communicators_where_sends_stay(layout, staying):
    nodes = LAYOUTS[layout]
    virtual.run(len(nodes), check_two_communicators, nodes)


@pytest.mark.mpi
@pytest.mark.parametrize("layout", REAL)
def test_two_communicators_waited_for_in_opposite_orders(link, layout):
    check_two_communicators(placed(link, layout))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", ["communicator", "plan"])
def test_what_is_freed_while_it_is_under_way_fails_and_holds_nobody_up(link, what):
    comm = link.Dup()
    plan = TwoStep(comm, 1000, "d")
    requests = [plan.start(), plan.start()] if comm.rank else []  # rank 0 does not take part, so that nothing can complete
    link.Barrier()
    (plan if what == "plan" else comm).Free()
    for request in requests:
        with pytest.raises(CommError, match="while it was under way"):
            request.Wait()
    assert not link.started
    total = np.array([1.0])
    allreduce(link, IN_PLACE, total)
    assert total == link.size


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
def test_a_thread_that_cuts_in_everywhere_mixes_up_no_messages(link, algorithm):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with progress(link) as moving:
            for _ in range(40):
                totals = [np.empty(50 + 10 * number) for number in range(8)]
                started = [moving.on(iallreduce(link, np.ones(len(t)), t, algorithm=algorithm)) for t in totals]
                for request in started[:: (1, -1)[link.rank % 2]]:
                    request.Wait()
                assert all((total == link.size).all() for total in totals)
    finally:
        sys.setswitchinterval(before)


def test_a_progress_thread_that_ends_while_it_finds_nothing_to_do(link, monkeypatch):
    moving = Progress(link)
    clear = moving._news.clear

    def clear_late():
        moving._ended = True
        moving._news.set()
        clear()

    monkeypatch.setattr(moving._news, "clear", clear_late)
    moving.begin()
    moving._thread.join()


@pytest.mark.mpi(min_size=2)
def test_a_first_call_on_another_communicator_while_one_is_under_way(link):
    other, data, total = link.Dup(), np.ones(100_000), np.empty(100_000)
    request = iallreduce(link, data, total, algorithm="ring")
    if link.rank % 2:
        request.Wait()
    allreduce(other, IN_PLACE, data)
    request.Wait()
    assert (total == link.size).all()
    assert (data == link.size).all()


class Looked:
    """A request that is there at the fourth look; at the second a signal's handler raises, if it ``rings``."""

    def __init__(self, rings=False):
        self.rings, self.looks = rings, 0

    def Test(self):
        self.looks += 1
        if self.rings and self.looks == 2:
            raise Odd
        return self.looks > 3

    def Wait(self):
        while not self.Test():
            pass


@pytest.mark.mpi
@pytest.mark.parametrize("waits", ["for another one", "for the library", "in turns"])
def test_a_signal_that_comes_while_another_is_moved_on_is_told_by_who_waits(link, waits):
    beside = Started(link, (), iter([Looked(rings=True)]))
    request = Started(link, (), iter([Looked()])) if waits != "for the library" else Looked()
    with pytest.raises(Odd):
        if waits == "for another one":
            request.Wait()
        elif waits == "for the library":
            link.wait(request)
        else:
            while not request.Test():
                pass
    assert waits != "for another one" or request.over
    beside.Wait()
    request.Wait()
    assert not link.broken


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["Wait", "go on"])
def test_what_the_library_has_ended_is_not_asked_again(link, way):
    comm, MPI = link.Dup(), load_mpi()
    request = Started(comm, (), iter([comm.Irecv(np.zeros(4), (comm.rank - 1) % comm.size, 3)]))
    sent = comm.Isend(np.ones(8), (comm.rank + 1) % comm.size, 3)
    while way == "go on" and not request.over:
        go_on(comm, [request])
    for _ in range(2):
        with pytest.raises(MPI.Exception) as found:
            request.Wait()
        assert found.value.Get_error_class() in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS)
    assert comm.broken
    sent.Wait()


class Odd(ZeroDivisionError):
    pass


def failing():
    yield from ()
    raise Odd("inside")


@pytest.mark.parametrize("before", ["nothing", "Test", "progress"])
def test_a_failure_inside_is_raised_by_wait_whoever_met_it(link, before):
    request = Started(link, (), failing())
    if before == "Test":
        with pytest.raises(Odd):
            request.Test()
    if before == "progress":
        with progress(link) as moving:
            over = threading.Event()
            request.then(over.set)
            moving.on(request)
            over.wait()
    for _ in range(2):
        with pytest.raises(Odd, match="inside"):
            request.Wait()
    with pytest.raises(Odd, match="inside"):
        request.Test()
    with pytest.raises(CommError, match="ended a collective call early"):
        allreduce(link, IN_PLACE, np.ones(3), algorithm="ring")
    allreduce(link.Dup(), IN_PLACE, np.ones(3), algorithm="ring")


def test_a_failure_at_the_start_is_raised_there(link):
    with pytest.raises(Odd):
        run(link, (), failing(), blocking=False)
