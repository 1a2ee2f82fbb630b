"""The MDS code: the decoded sum is the direct one, whichever workers are late, and with the precision that is documented."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddl.coding.choose_owners import choose_owners, senders
from mpiddl.coding.harmonic_frame import harmonic_frame
from mpiddl.coding.mds_code import CACHED_BYTES, MdsCode
from mpiddl.coding.placements import BlockPlacement, all_subsets, cyclic, replicated_groups
from mpiddl.errors import ShapeError, UsageError

pytestmark = pytest.mark.no_mpi

KINDS = [all_subsets, replicated_groups, cyclic]
CASES = [(n, r) for n in range(1, 7) for r in range(1, n + 1)]


def gradients(placement, size, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal((len(placement.owners), size)).astype(dtype)


def decoded(code, grads, chosen):
    """The sum that each worker decodes, with nothing sent but the vectors of the senders."""
    size, coded = grads.shape[1], {}
    for worker in senders(chosen):
        coded[worker] = np.full(code.slice_size(size), np.nan, grads.dtype)
        code.encode(worker, {block: grads[block] for block in code.placement.blocks[worker]}, chosen, coded[worker])
    total = np.full(size, np.nan, grads.dtype)
    code.decode(coded, chosen, total)
    return total


def relative_error(total, grads):
    exact = grads.astype(np.longdouble).sum(0)
    return float(np.linalg.norm((total - exact).astype(float)) / np.linalg.norm(exact.astype(float)))


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("columns", [8, 9])
def test_any_columns_of_the_matrix_are_invertible(rows, columns):
    matrix = harmonic_frame(columns, rows)
    assert np.linalg.norm(matrix, axis=0) == pytest.approx(rows**0.5)
    assert (matrix == matrix.astype(np.float32)).all()
    conditions = [np.linalg.cond(matrix[:, list(some)]) for some in combinations(range(columns), rows)]
    assert max(conditions) < 33  # with Chebyshev points: 1,000


@pytest.mark.parametrize(("n", "m", "most"), [(4, 2, 2.5), (8, 3, 12), (10, 5, 43)])
def test_the_condition_that_is_documented(n, m, most):
    matrix = harmonic_frame(n, m)
    assert most * 0.95 < max(np.linalg.cond(matrix[:, list(some)]) for some in combinations(range(n), m)) < most


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("workers", "redundancy"), CASES)
def test_the_sum_is_the_direct_one_whichever_workers_are_late(kind, workers, redundancy):
    placement = kind(workers, redundancy)
    for late in range(redundancy):
        code = MdsCode(placement, redundancy - late)
        grads = gradients(placement, 13)
        for absent in combinations(range(workers), late):
            chosen = code.choose([() if worker in absent else own for worker, own in enumerate(placement.blocks)])
            assert not set(absent) & set(senders(chosen))
            assert relative_error(decoded(code, grads, chosen), grads) < 1e-13


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, CACHED_BYTES // 2 + 1])
def test_sizes_that_nothing_divides(size, dtype):
    code = MdsCode(all_subsets(4, 3), 3)
    grads = gradients(code.placement, size, dtype)
    total = decoded(code, grads, code.choose())
    assert total == pytest.approx(grads.astype(float).sum(0), abs=40 * float(np.finfo(dtype).eps))


def test_one_slice_adds_without_rounding_the_factors():
    code = MdsCode(cyclic(5, 3), 1)
    grads = np.random.default_rng(2).integers(-1000, 1000, (5, 9)).astype(np.float32)
    assert (decoded(code, grads, code.choose()) == grads.sum(0)).all()


@pytest.mark.parametrize(("n", "r", "single", "double"), [(4, 2, 8e-8, 1.6e-16), (10, 5, 1.9e-6, 3.6e-15)])
def test_the_error_that_is_documented(n, r, single, double):
    code = MdsCode(all_subsets(n, r), r)
    for dtype, wanted in ((np.float32, single), (np.float64, double)):
        grads = gradients(code.placement, 4000, dtype)
        assert relative_error(decoded(code, grads, code.choose()), grads) == pytest.approx(wanted, rel=0.15)


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(KINDS), st.integers(1, 6), st.data())
def test_partial_results_of_late_workers_are_used(kind, workers, data):
    redundancy = data.draw(st.integers(1, workers))
    placement, needed = kind(workers, redundancy), data.draw(st.integers(1, redundancy))
    finished = [data.draw(st.sets(st.sampled_from(own))) for own in placement.blocks]
    chosen = choose_owners(placement, needed, finished)
    ready = [[worker for worker in owners if block in finished[worker]] for block, owners in enumerate(placement.owners)]
    assert (chosen is None) == any(len(some) < needed for some in ready)
    if chosen is None:
        return
    assert all(len(some) == needed and set(some) <= set(all_) for some, all_ in zip(chosen, ready, strict=True))
    for one in senders(chosen):  # none of them could be left out
        assert any(len(set(some) & set(senders(chosen)) - {one}) < needed for some in ready)
    grads = gradients(placement, 5)
    assert relative_error(decoded(MdsCode(placement, needed), grads, chosen), grads) < 1e-12


@pytest.mark.parametrize(("workers", "redundancy"), [(6, 3), (5, 2), (8, 3)])
def test_no_more_senders_than_needed_and_equal_work(workers, redundancy):
    for late in range(redundancy):
        chosen = MdsCode(all_subsets(workers, redundancy), redundancy - late).choose()
        assert senders(chosen) == list(range(workers - late))
        work = [sum(worker in some for some in chosen) for worker in senders(chosen)]
        assert max(work) <= 1.2 * sum(work) / len(work)
    assert len(senders(MdsCode(replicated_groups(6, 3), 2).choose())) == 4


def test_the_worker_that_has_finished_least_is_left_out():
    placement = all_subsets(4, 3)  # blocks 012, 013, 023, 123
    finished = [set(own) for own in placement.blocks]
    assert senders(MdsCode(placement, 2).choose(finished)) == [0, 1, 2]
    finished[0] = {0, 1}
    assert senders(MdsCode(placement, 2).choose(finished)) == [1, 2, 3]


def test_blocks_may_be_added_one_at_a_time():
    code = MdsCode(cyclic(4, 2), 2)
    grads, chosen = gradients(code.placement, 11), code.choose()
    whole, grown = np.empty(6), np.zeros(6)
    code.encode(1, dict(enumerate(grads)), chosen, whole)
    for block in code.placement.blocks[1]:
        code.add_block(1, block, grads[block], chosen, grown)
    assert (whole == grown).all()


def test_the_order_in_which_vectors_arrive_does_not_change_the_bits():
    code = MdsCode(cyclic(5, 3), 3)
    vectors = dict(enumerate(np.random.default_rng(3).standard_normal((5, 40)).astype(np.float32)))
    totals = np.empty((2, 118), np.float32)
    code.decode(vectors, code.choose(), totals[0])
    code.decode({worker: vectors[worker] for worker in (3, 1, 4, 0, 2)}, code.choose(), totals[1])
    assert (totals[0] == totals[1]).all()


@pytest.mark.parametrize("slices", [0, 3, -1, 1.5])
def test_slices_that_make_no_sense(slices):
    with pytest.raises(UsageError, match=f"slices: got {slices} with redundancy 2, expected a whole number from 1 to 2"):
        MdsCode(cyclic(4, 2), slices)


def test_arguments_that_do_not_fit():
    code, ones = MdsCode(BlockPlacement(2, ((0, 1), (0, 1))), 2), np.ones(4)
    chosen, out = code.choose(), np.empty(2)
    with pytest.raises(UsageError, match=r"gradients: got blocks \[0\], expected also block 1"):
        code.encode(0, {0: ones}, chosen, out)
    with pytest.raises(ShapeError, match=r"gradient: got float32 of shape \(4,\), expected float64"):
        code.encode(0, {0: ones, 1: ones.astype(np.float32)}, chosen, out)
    with pytest.raises(ShapeError, match=r"out: got float64 of shape \(2,\), expected float64 of shape \(3,\)"):
        code.encode(0, {0: np.ones(5)}, chosen, out)
    with pytest.raises(UsageError, match=r"dtype: got dtype\('int64'\)"):
        code.encode(0, {0: np.ones(4, int)}, chosen, np.empty(2, int))
    with pytest.raises(UsageError, match="worker: got 1 for block 0, expected one of the chosen owners"):
        code.add_block(1, 0, ones, ((0, 2),), out)
    with pytest.raises(UsageError, match=r"coded: got vectors of workers \[1\], expected also those of \[0\]"):
        code.decode({1: out}, chosen, ones)
    with pytest.raises(ShapeError, match=r"coded\[1\]: got float64 of shape \(4,\)"):
        code.decode({0: out, 1: ones}, chosen, np.empty(4))
    with pytest.raises(UsageError, match="finished: got the blocks of 1 workers, expected those of 2"):
        code.choose([(0, 1)])
    with pytest.raises(UsageError, match=r"finished: got block 7 of worker 1, expected some of \[0, 1\]"):
        code.choose([(0, 1), (7,)])
