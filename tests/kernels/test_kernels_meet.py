"""The kernels of a node: the barrier in memory, and sums that lie between two of them."""

from __future__ import annotations

import functools
import os
import threading
from itertools import pairwise

import numpy as np
import pytest

from mpiddl.kernels.node.meet import FLAGS, meet
from mpiddl.kernels.node.node_copy_sum import node_copy_sum
from mpiddl.kernels.node.node_read_sum import DONE, FAILED, FIRST, LAST, UNREAD, WORDS, node_read_sum, slice_of
from mpiddl.kernels.node.node_sum import BLOCK_BYTES, node_sum
from mpiddl.kernels.node.remote import VECTORS
from mpiddl.memory import ALIGNMENT, aligned_zeros

pytestmark = pytest.mark.no_mpi

FLOATS = ["float32", "float64"]


def places(size):
    """Flags in common, and a state for each rank."""
    flags = np.zeros((size, FLAGS), np.int64).reshape(-1)
    return [(flags, np.zeros(5, np.int64), rank, size) for rank in range(size)]


def addresses(arrays):
    return np.array([array.ctypes.data for array in arrays])


def take_turns(calls, most=100_000):
    """Every rank a little at a time, until all are done; no rank may wait for one that has not been called."""
    left = list(calls)
    for _ in range(most):
        left = [call for call in left if not call(0)]
        if not left:
            return
    pytest.fail("the ranks wait for each other for ever")


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13])
def test_nobody_passes_before_the_last_has_come(size):
    ranks = places(size)
    for generation in range(3):
        order = np.random.default_rng(generation).permutation(size)
        early, last = order[:-1], order[-1]
        for _ in range(5):
            assert not any(meet(*ranks[rank], 3) for rank in early)
        passed = dict.fromkeys(order, False)
        for _ in range(size):
            for rank in (last, *early):
                passed[rank] = passed[rank] or meet(*ranks[rank], 0)
        assert all(passed.values())
        assert [int(state[0]) for _, state, _, _ in ranks] == [generation + 1] * size


def test_one_rank_waits_for_nobody():
    (alone,) = places(1)
    assert all(meet(*alone, 0) for _ in range(3))


def test_a_rank_that_is_ahead_by_one_barrier_waits_there():
    first, second = places(2)
    assert not meet(*first, 0)
    assert meet(*second, 0)
    assert not meet(*second, 10)  # the next one, before the first rank has left this one
    assert meet(*first, 0)
    assert not meet(*second, 10)
    assert meet(*first, 0)
    assert meet(*second, 0)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_was_written_before_is_seen_after_by_threads(size):
    ranks, turns = places(size), 400 if size < 5 else 100
    data, seen = np.zeros((size, 64), np.int64), []
    assert not meet(*places(2)[0], 0)  # compiled before threads need it

    def body(rank):
        for turn in range(1, turns + 1):
            data[rank] = turn
            while not meet(*ranks[rank], 300):
                pass
            seen.append((data == turn).all())
            while not meet(*ranks[rank], 300):
                pass

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == size * turns
    assert all(seen)


def inputs_of(count, n, dtype, off):
    """Arrays that begin `off` elements behind a cache line."""
    rng = np.random.default_rng([count, n])
    arrays = []
    for number in range(count):
        array = aligned_zeros(n + off * number, dtype)[off * number :]
        array[:] = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)
        arrays.append(array)
    return arrays


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_node_sum_is_numpys_bit_for_bit(dtype, count, off, streamed):
    line, block = ALIGNMENT // np.dtype(dtype).itemsize, BLOCK_BYTES // np.dtype(dtype).itemsize
    for n in (1, line - 1, line, 5 * line + 3, block, 2 * block + line + 1):
        inputs = inputs_of(count, n, dtype, off)
        wanted = functools.reduce(np.add, inputs)
        for begin in {0, n // line // 2 * line}:
            for end in {n, max(begin, n - 5), begin}:
                result = aligned_zeros(n + line, dtype)
                result[:] = 77
                assert node_sum(result, addresses(inputs), begin, end, streamed, *places(1)[0], 10)
                assert result[begin:end].tobytes() == wanted[begin:end].tobytes()
                assert (result[:begin] == 77).all() and (result[end:] == 77).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_ranks_of_a_node_sum_a_part_each(count, dtype):
    n, line = 1003, ALIGNMENT // np.dtype(dtype).itemsize
    inputs, result, ranks = inputs_of(count, n, dtype, 0), aligned_zeros(n, dtype), places(count)
    for _ in range(3):
        result[:] = 0
        edges = [n * rank // count // line * line for rank in range(count)] + [n]
        calls = [
            functools.partial(node_sum, result, addresses(inputs), edges[rank], edges[rank + 1], False, *ranks[rank])
            for rank in range(count)
        ]
        assert not any(call(0) for call in calls[:-1])
        assert not result.any()  # nobody adds up before the last input is there
        take_turns(calls)
        assert result.tobytes() == functools.reduce(np.add, inputs).tobytes()
        inputs[0] *= 3


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("in_place", [False, True])
def test_sums_through_stages_are_numpys_bit_for_bit(count, dtype, in_place):
    half = 64
    stages, ranks = [aligned_zeros(2 * half, dtype) for _ in range(count)], places(count)
    for n in (1, half - 1, half, half + 1, 2 * half, 7 * half + 5, 3):  # one after the other: halves go on alternating
        sources = inputs_of(count, n, dtype, 1)
        wanted = functools.reduce(np.add, sources)
        kept = [source.copy() for source in sources]
        results = sources if in_place else [np.zeros(n + 1, dtype)[1:] for _ in sources]
        take_turns(
            [
                functools.partial(node_copy_sum, source, result, addresses(stages), half, *rank)
                for source, result, rank in zip(sources, results, ranks, strict=True)
            ]
        )
        for source, result, before in zip(sources, results, kept, strict=True):
            assert result.tobytes() == wanted.tobytes()
            assert in_place or source.tobytes() == before.tobytes()


def reads(sources, parts, bounds, origins, gather, who, told, ranks, piece=64):
    """A call of `node_read_sum` for every rank; in one process, which may read itself."""
    count, dtype = len(sources), sources[0].dtype
    return [
        functools.partial(node_read_sum, sources[rank], parts[rank], bounds[rank], bounds[rank + 1], origins[rank],
                          gather[rank], addresses(told), who[rank], np.empty((count, piece), dtype),
                          np.empty(count, np.int64), np.empty(VECTORS, np.int64), *ranks[rank])
        for rank in range(count)
    ]  # fmt: skip


def slices(n, itemsize, count):
    return [slice_of(n, itemsize, rank, count) for rank in range(count + 1)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [2, 3, 4, 7])
@pytest.mark.parametrize("in_place", [False, True])
def test_sums_of_what_is_read_are_numpys_bit_for_bit(count, dtype, in_place):
    ranks, told = places(count), [np.zeros(WORDS, np.int64) for _ in range(count)]
    who = [np.full(count, os.getpid(), np.int32)] * count
    for n in (1, count, 16 * count - 1, 33 * count, 7 * 64 * count + 5, 0, 3):
        sources = inputs_of(count, n, dtype, 1)
        wanted = functools.reduce(np.add, sources)
        kept = [source.copy() for source in sources]
        results = sources if in_place else [np.zeros(n + 1, dtype)[1:] for _ in sources]
        bounds = slices(n, sources[0].itemsize, count)
        take_turns(reads(sources, results, bounds, [0] * count, [True] * count, who, told, ranks))
        for source, result, before in zip(sources, results, kept, strict=True):
            assert result.tobytes() == wanted.tobytes()
            assert in_place or source.tobytes() == before.tobytes()
    assert not any(state[UNREAD] for _, state, _, _ in ranks)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("root", [0, 1, None])
def test_one_rank_gathers_or_none_does(count, root):
    n, dtype, ranks, told = 1003, "float32", places(count), [np.zeros(WORDS, np.int64) for _ in range(count)]
    sources, bounds = inputs_of(count, n, dtype, 1), slices(n, 4, count)
    wanted = functools.reduce(np.add, sources)
    gather = [rank == root for rank in range(count)]
    origins = [0 if gather[rank] else bounds[rank] for rank in range(count)]
    parts = [np.zeros(n if gather[rank] else bounds[rank + 1] - bounds[rank], dtype) for rank in range(count)]
    who = [np.full(count, os.getpid(), np.int32)] * count
    take_turns(reads(sources, parts, bounds, origins, gather, who, told, ranks))
    for rank, part in enumerate(parts):
        assert part.tobytes() == (wanted if gather[rank] else wanted[bounds[rank] : bounds[rank + 1]]).tobytes()


def test_what_cannot_be_read_is_known_to_all_and_nobody_waits():
    count, dtype, ranks = 3, "float32", places(3)
    told = [np.zeros(WORDS, np.int64) for _ in range(count)]
    sources, bounds = inputs_of(count, 100, dtype, 1), slices(100, 4, count)
    kept = [source.copy() for source in sources]
    who = [np.full(count, os.getpid() if rank != 1 else -1, np.int32) for rank in range(count)]
    take_turns(reads(sources, sources, bounds, [0] * count, [True] * count, who, told, ranks))
    for rank, (source, before) in enumerate(zip(sources, kept, strict=True)):  # what the failed rank still has to read
        assert all((source[begin:end] == before[begin:end]).all() for other, (begin, end) in enumerate(pairwise(bounds))
                   if other != rank)
    assert [bool(one[FAILED]) for one in told] == [False, True, False]
    assert [one[DONE] == one[LAST] for one in told] == [True, False, True] and told[1][DONE] == told[1][FIRST]
    assert all(state[UNREAD] for _, state, _, _ in ranks)
