"""Losses, gathering and the sum of squares against numpy in float64, between guard bytes."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from harness.kernel_calls import blank, digest_elementwise, draw, each_dtype, guarded, intact, labels_for, softmax_cross_entropy

from mpiddl import kernels

pytestmark = pytest.mark.no_mpi

SHAPES = [(0, 3), (1, 1), (1, 10), (2, 2), (3, 7), (7, 15), (15, 16), (16, 17), (31, 33), (33, 64), (64, 100), (257, 31)]

each_shape = pytest.mark.parametrize(("n", "c"), SHAPES)


def by_formula(logits, labels):
    z = logits.astype(np.float64)
    rows, z = np.arange(len(z)), z - z.max(1, keepdims=True, initial=-np.inf)
    total = np.exp(z).sum(1)
    delta = np.exp(z) / total[:, None]
    delta[rows, labels] -= 1
    return math.fsum(np.log(total) - z[rows, labels]), int((logits.argmax(1) == labels).sum()), delta


@each_dtype
@each_shape
@pytest.mark.parametrize("spread", [1, 100])
def test_cross_entropy_follows_the_formula(n, c, spread, dtype):
    logits, labels = draw(dtype, n, c), labels_for(n, c)
    logits *= spread
    loss, correct, bad, delta = softmax_cross_entropy(logits, labels)
    wanted_loss, wanted_correct, wanted = by_formula(logits, labels)
    tolerance = (8 + c / 8) * float(np.finfo(dtype).eps)
    assert bad == -1
    assert correct == wanted_correct
    assert loss == pytest.approx(wanted_loss, rel=tolerance, abs=tolerance * n)
    np.testing.assert_allclose(delta, wanted, rtol=0, atol=tolerance)


@each_dtype
def test_cross_entropy_may_write_over_its_logits(dtype):
    logits, labels = draw(dtype, 9, 13), labels_for(9, 13)
    *apart, delta = softmax_cross_entropy(logits, labels)
    *in_place, over = softmax_cross_entropy(logits, labels, delta=logits)
    assert in_place == apart
    assert np.array_equal(over, delta)


@each_dtype
@pytest.mark.parametrize("wrong", [-1, 5, 6, -(2**62), 2**62])
@pytest.mark.parametrize("row", [0, 2, 3])
def test_the_first_row_with_a_label_out_of_range_is_told_and_not_computed(row, wrong, dtype):
    logits, labels = draw(dtype, 4, 5), labels_for(4, 5)
    labels[row:] = wrong
    loss, correct, bad, delta = softmax_cross_entropy(logits, labels)
    wanted_loss, wanted_correct, _ = by_formula(logits[:row], labels[:row])
    assert (bad, correct) == (row, wanted_correct)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert np.isfinite(delta[:row]).all()
    assert np.isnan(delta[row:]).all()


@each_dtype
def test_the_class_found_is_the_first_of_the_largest(dtype):
    logits = np.zeros((3, 40), dtype)
    logits[1, [5, 21, 39]] = 2
    logits[2] = -1e30
    for labels, hits in (([0, 5, 0], 3), ([1, 21, 39], 0)):
        assert softmax_cross_entropy(guarded(logits), guarded(labels))[1] == hits


@each_dtype
def test_huge_logits_neither_overflow_nor_lose_the_loss(dtype):
    loss, _, _, delta = softmax_cross_entropy(guarded(np.array([[1e30, 0, -1e30]], dtype)), guarded([1]))
    assert loss == pytest.approx(1e30, rel=1e-6)
    np.testing.assert_allclose(delta, [[1, -1, 0]], rtol=0, atol=1e-30)


@each_dtype
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_shows_in_the_loss(value, dtype):
    logits = draw(dtype, 3, 20)
    logits[1, 17] = value
    assert not np.isfinite(softmax_cross_entropy(logits, labels_for(3, 17))[0])


@each_dtype
@each_shape
def test_squared_error_is_half_the_sum_of_squares(n, c, dtype):
    outputs, targets, delta = draw(dtype, n, c), draw(dtype, n, c, seed=1), blank((n, c), dtype)
    loss = kernels.squared_error(outputs, targets, delta)
    assert intact(outputs, targets, delta)
    assert np.array_equal(delta, outputs - targets)
    assert loss == pytest.approx(math.fsum(0.5 * delta.astype(np.float64).ravel() ** 2), rel=1e-13)
    assert kernels.squared_error(outputs, targets, outputs) == loss
    assert np.array_equal(outputs, delta)


@pytest.mark.parametrize("source_type", ["uint8", "float32", "float64"])
@each_dtype
@pytest.mark.parametrize(("rows", "cols", "taken"), [(1, 1, 1), (5, 3, 0), (7, 16, 20), (17, 33, 9), (100, 257, 31), (3, 0, 2)])
def test_gathered_rows_are_converted_and_scaled(rows, cols, taken, dtype, source_type):
    rng = np.random.default_rng([rows, cols])
    source, index = guarded(rng.integers(0, 256, (rows, cols)).astype(source_type)), guarded(rng.integers(0, rows, taken))
    out = blank((taken, cols), dtype)
    assert kernels.gather_rows(source, index, np.dtype(dtype).type(1 / 255), out) == -1
    assert intact(source, index, out)
    np.testing.assert_allclose(out, source[index].astype(np.float64) / 255, rtol=2 * np.finfo(dtype).eps)


@each_dtype
@pytest.mark.parametrize("wrong", [-1, 4, 2**40])
def test_the_first_index_outside_the_source_is_told_and_nothing_behind_it_written(wrong, dtype):
    source, index, out = draw(dtype, 4, 9), guarded([3, 0, wrong, 1, wrong]), blank((5, 9), dtype)
    assert kernels.gather_rows(source, index, np.dtype(dtype).type(1), out) == 2
    assert intact(source, index, out)
    assert np.array_equal(out[:2], source[[3, 0]])
    assert np.isnan(out[2:]).all()


@each_dtype
def test_no_row_can_be_taken_from_none(dtype):
    assert kernels.gather_rows(draw(dtype, 0, 3), guarded([0]), np.dtype(dtype).type(1), blank((1, 3), dtype)) == 0


@each_dtype
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 100, 257, 5000])
def test_the_sum_of_squares_is_exact_to_float64(n, dtype):
    values = draw(dtype, n)
    found = kernels.sum_squares(values)
    assert intact(values)
    assert found == pytest.approx(math.fsum(values.astype(np.float64) ** 2), rel=1e-13)
    assert isinstance(found, float)


@each_dtype
def test_bits_repeat_here_and_in_another_process(command, dtype):
    own = digest_elementwise(dtype)
    assert digest_elementwise(dtype) == own
    code = f"from harness.kernel_calls import digest_elementwise; print(digest_elementwise('{dtype}'))"
    assert command(sys.executable, "-c", code, cwd=Path(__file__).parents[1]).stdout.strip() == own
