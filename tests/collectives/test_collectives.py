"""All-reduce, every algorithm: equal to a fold by numpy, the same bits on every rank and every time, wherever the ranks are."""

from __future__ import annotations

import numpy as np
import pytest
from harness import queue_transport
from harness.reductions import ALGORITHMS, LAYOUTS, OPS, REAL, fold, given, lengths, ops, placed, real_nodes, rough

from mpiddl.collectives import allreduce, allreduce_ring
from mpiddl.collectives import allreduce_doubling as doubling
from mpiddl.collectives.allreduce_two_step import staged
from mpiddl.collectives.plan import staged_steps
from mpiddl.collectives.wire import wire
from mpiddl.transport import virtual
from mpiddl.transport.base import COMBINE, IN_PLACE, MAX, REDUCED, SUM

pytestmark = pytest.mark.no_mpi

def check_calls(comm, algorithm, dtypes, sizes, chosen=OPS):
    """Every dtype, op and length, in place and not."""
    for dtype in dtypes:
        for op in [op for op in ops(dtype) if op in chosen]:
            for n in sizes:
                mine, wanted = given(comm.rank, n, dtype), fold(comm.size, n, dtype, op)
                total = np.full(n, 99).astype(dtype)
                allreduce(comm, mine, total, op, algorithm=algorithm)
                np.testing.assert_array_equal(total, wanted)
                np.testing.assert_array_equal(mine, given(comm.rank, n, dtype))
                allreduce(comm, IN_PLACE, mine, op, algorithm=algorithm)
                np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_length_on_every_layout(layout, algorithm):
    nodes = LAYOUTS[layout]
    virtual.run(len(nodes), lambda comm: check_calls(comm, algorithm, "l", lengths(comm.size), [SUM]), nodes)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", ["3", "2+3"])
def test_every_dtype(layout, algorithm):
    nodes = LAYOUTS[layout]
    virtual.run(len(nodes), lambda comm: check_calls(comm, algorithm, REDUCED, [comm.size + 1]), nodes)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_transport_that_only_moves_messages(size, algorithm):
    def program(comm):
        check_calls(comm, algorithm, "l", lengths(size), [SUM])
        check_calls(comm, algorithm, REDUCED, [size + 1])
        check_bits(comm, algorithm)
        if algorithm in SMALL:
            check_small(comm, algorithm)

    queue_transport.run(size, program)


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", REAL)
def test_real_ranks(link, layout, algorithm):
    check_calls(placed(link, layout), algorithm, "f", lengths(link.size), [SUM])


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", ["one", "uneven"])
def test_real_ranks_every_dtype(link, layout, algorithm):
    check_calls(placed(link, layout), algorithm, REDUCED if layout == "one" else "dF", [link.size + 1])


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", REAL)
def test_long_arrays_of_real_ranks_against_the_library(link, layout, algorithm):
    comm = placed(link, layout)
    mine = np.random.default_rng(comm.rank).integers(-99, 99, 300_001).astype("f")
    wanted, total = np.empty_like(mine), np.empty_like(mine)
    link.Allreduce(mine, wanted)
    allreduce(comm, mine, total, algorithm=algorithm)
    np.testing.assert_array_equal(total, wanted)


def check_bits(comm, algorithm):
    mine, total = rough(comm.rank), np.empty(3001, np.float32)
    allreduce(comm, mine, total, algorithm=algorithm)
    everyone = np.array([rough(rank) for rank in range(comm.size)], np.float64)
    bound = comm.size * np.finfo(np.float32).eps * np.abs(everyone).sum(axis=0)
    assert (np.abs(total - everyone.sum(axis=0)) <= bound).all()
    assert set(comm.allgather(total.tobytes())) == {total.tobytes()}
    allreduce(comm, IN_PLACE, mine, algorithm=algorithm)
    assert mine.tobytes() == total.tobytes()
    return total.tobytes()


STRANGE = np.array([np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, 1.5])


def check_strange_bits(comm, algorithm):
    """Which of two NaNs is kept, and the sign of a zero, must not depend on the rank."""
    for seed in range(12):
        for n in (1, 2, 33):
            drawn = STRANGE[np.random.default_rng([seed, comm.rank]).integers(0, len(STRANGE), n)]
            for dtype in "fD":
                total = np.empty(n + comm.rank % 2, dtype)[comm.rank % 2 :]
                with np.errstate(invalid="ignore"):
                    allreduce(comm, drawn.astype(dtype), total, algorithm=algorithm)
                assert len(set(comm.allgather(total.tobytes()))) == 1


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", REAL)
def test_the_same_bits_of_what_is_no_number(link, layout, algorithm):
    check_strange_bits(placed(link, layout), algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_on_every_rank_every_time(layout, algorithm):
    nodes = LAYOUTS[layout]
    virtual.run(len(nodes), lambda comm: check_bits(comm, algorithm), nodes)


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", REAL)
def test_the_same_bits_on_real_ranks_and_virtual_ones(link, layout, algorithm):
    nodes = real_nodes(link.size)[layout]
    bits = check_bits(placed(link, layout), algorithm)
    if algorithm in ("ring", "doubling"):
        assert bits == virtual.run(link.size, lambda comm: check_bits(comm, algorithm), nodes)[0]


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", ["one", "uneven"])
def test_what_is_no_number_and_infinities_go_through(link, layout, algorithm):
    comm = placed(link, layout)
    for op in OPS:
        mine = np.ones(200)
        if comm.rank == comm.size - 1:
            mine[:3] = np.nan, np.inf, -np.inf
        total = np.empty(200)
        allreduce(comm, mine, total, op, algorithm=algorithm)
        everyone = np.ones((comm.size, 200))
        everyone[-1, :3] = np.nan, np.inf, -np.inf
        np.testing.assert_array_equal(total, COMBINE[op].reduce(everyone))


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_shape_and_what_must_not_be_written(link, algorithm):
    mine, wanted = given(link.rank, 400, "f"), fold(link.size, 400, "f", SUM)
    mine.flags.writeable = False
    total = np.zeros((50, 1, 9), np.float32)[:, :, :8].copy()
    allreduce(link, mine.reshape(2, 200), total, algorithm=algorithm)
    np.testing.assert_array_equal(total.reshape(-1), wanted)
    middle = np.zeros(1000, np.float32)
    allreduce(link, mine, middle[99:499], algorithm=algorithm)
    np.testing.assert_array_equal(middle[99:499], wanted)
    assert not middle[:99].any() and not middle[499:].any()
    number = np.array(link.rank + 1.0)
    allreduce(link, IN_PLACE, number, algorithm=algorithm)
    assert number == link.size * (link.size + 1) / 2


SMALL = {
    "ring": lambda comm, mine, total, op: allreduce_ring.allreduce_ring(wire(comm), mine, total, op, segment_bytes=64),
    "ring, less than an element": lambda comm, mine, total, op: allreduce_ring.allreduce_ring(
        wire(comm), mine, total, op, segment_bytes=1
    ),
    "doubling": lambda comm, mine, total, op: doubling.allreduce_doubling(wire(comm), mine, total, op, largest=7),
    "two-step": lambda comm, mine, total, op: staged_steps(
        staged(comm, total.nbytes, total.dtype, op, most_bytes=200), mine, total
    ),
    "two-step-leader": lambda comm, mine, total, op: staged_steps(
        staged(comm, total.nbytes, total.dtype, op, leader=True, most_bytes=200), mine, total
    ),
}


def check_small(comm, algorithm):
    for n in (1, comm.size + 1, 247):
        for op in (SUM, MAX):
            mine, total = given(comm.rank, n, "d"), np.empty(n)
            for request in SMALL[algorithm](comm, mine, total, op):
                request.Wait()
            np.testing.assert_array_equal(total, fold(comm.size, n, "d", op))


@pytest.mark.parametrize("algorithm", SMALL)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_segments_and_pieces(layout, algorithm):
    virtual.run(len(LAYOUTS[layout]), lambda comm: check_small(comm, algorithm), LAYOUTS[layout])


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", SMALL)
@pytest.mark.parametrize("layout", ["one", "halves"])
def test_many_segments_and_pieces_of_real_ranks(link, layout, algorithm):
    check_small(placed(link, layout), algorithm)
