"""The products of a dense layer against numpy in float64, between guard bytes that must neither be read nor written."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from harness.kernel_calls import (
    IDENTITY,
    RELU,
    TANH,
    blank,
    close,
    digest_dense,
    draw,
    each_dtype,
    forward,
    guarded,
    input_gradient,
    intact,
    scratch,
    weight_gradient,
)

from mpiddl import kernels

pytestmark = pytest.mark.no_mpi

SHAPES = [  # rows, inputs, outputs
    (0, 3, 5),
    (1, 1, 1),
    (1, 257, 10),
    (2, 3, 100),
    (3, 7, 15),
    (7, 16, 17),
    (15, 17, 2),
    (16, 31, 33),
    (17, 2, 64),
    (31, 33, 16),
    (33, 64, 257),
    (64, 100, 31),
    (100, 257, 7),
    (257, 15, 3),
    (300, 290, 49),  # more than one block of rows, of inputs and of panels
    (5, 40, 1100),
    (4, 530, 530),
]

each_shape = pytest.mark.parametrize(("n", "k", "m"), SHAPES)
each_activation = pytest.mark.parametrize("activation", [IDENTITY, RELU, TANH])


def wide(*arrays):
    return [array.astype(np.float64) for array in arrays]


def activated(z, activation):
    return {IDENTITY: z, RELU: np.maximum(z, 0), TANH: np.tanh(z)}[activation]


def slope(h, activation):
    return {IDENTITY: np.ones_like(h), RELU: (h > 0).astype(h.dtype), TANH: 1 - h * h}[activation]


@each_dtype
@each_activation
@each_shape
def test_forward_is_the_activation_of_a_product_and_a_bias(n, k, m, activation, dtype):
    x, weight, bias = draw(dtype, n, k), draw(dtype, k, m), draw(dtype, m)
    x64, weight64, bias64 = wide(x, weight, bias)
    wanted = activated(x64 @ weight64 + bias64, activation)
    size = np.abs(x64) @ np.abs(weight64) + np.abs(bias64) + 1
    assert close(forward(x, weight, bias, activation), wanted, size, k)


@each_dtype
@each_shape
def test_the_weight_gradient_is_the_product_with_the_inputs_transposed(n, k, m, dtype):
    x, delta = draw(dtype, n, k), draw(dtype, n, m)
    x64, delta64 = wide(x, delta)
    assert close(weight_gradient(x, delta)[0], x64.T @ delta64, np.abs(x64).T @ np.abs(delta64), n)


@each_dtype
@pytest.mark.parametrize("share", [0.5, 0.97, 1.0])
@pytest.mark.parametrize("n", [1, 7, 200, 600])
def test_the_weight_gradient_leaves_out_zeros_only(n, share, dtype):
    """Inputs that are zero in whole groups of columns, in some of them, everywhere, and beside NaN."""
    x, delta = draw(dtype, n, 45), draw(dtype, n, 19)
    x[:, :20][np.random.default_rng(1).random((n, 20)) < share] = 0
    x[:, 20:][np.random.default_rng(2).random(n) < share] = 0
    x64, delta64 = wide(x, delta)
    found = weight_gradient(x, delta)[0]
    assert close(found, x64.T @ delta64, np.abs(x64).T @ np.abs(delta64), n)
    x[n // 2, 30] = np.nan
    broken = weight_gradient(x, delta)[0]
    assert np.isnan(broken[30]).all() and np.isfinite(np.delete(broken, 30, axis=0)).all()


@each_dtype
@each_shape
def test_the_bias_gradient_is_the_sum_of_the_rows(n, k, m, dtype):
    delta = draw(dtype, n, m)
    assert close(weight_gradient(draw(dtype, n, k), delta)[1], wide(delta)[0].sum(0), np.abs(wide(delta)[0]).sum(0), n)


@each_dtype
@each_activation
@each_shape
def test_the_input_gradient_carries_the_slope_of_the_activation(n, k, m, activation, dtype):
    delta, weight, z = draw(dtype, n, m), draw(dtype, k, m), draw(dtype, n, k)
    hidden = activated(z, activation)
    delta64, weight64, hidden64 = wide(delta, weight, hidden)
    wanted = (delta64 @ weight64.T) * slope(hidden64, activation)
    assert close(input_gradient(delta, weight, activation, hidden), wanted, np.abs(delta64) @ np.abs(weight64.T), m)


@each_dtype
def test_relu_has_slope_zero_at_zero(dtype):
    ones = np.ones((1, 4), dtype)
    hidden = np.array([[0.0, -0.0, 1.0, 5.0]], dtype)
    assert input_gradient(guarded(ones[:, :1]), guarded(ones.T), RELU, hidden).tolist() == [[0, 0, 1, 1]]


@each_dtype
def test_tanh_is_odd_saturates_and_keeps_small_numbers(dtype):
    tiny = float(np.finfo(dtype).tiny)
    values = np.array([0.0, tiny, 1e-30, 1e-9, 1e-4, 0.3, 0.35, 1, 5, 9, 20, 89, 400, 1e4, 1e30, np.inf], dtype)
    nothing, line = np.zeros((1, 1), dtype), guarded(np.concatenate([values, -values]))
    weight = guarded(np.zeros((1, line.size), dtype))
    found = forward(guarded(nothing), weight, line, TANH)[0]
    np.testing.assert_allclose(found, np.tanh(line.astype(np.float64)), rtol=4 * np.finfo(dtype).eps, atol=0)
    assert np.array_equal(found[: values.size], -found[values.size :])


@each_dtype
@pytest.mark.parametrize("activation", [IDENTITY, TANH])
def test_not_a_number_in_an_input_row_reaches_its_outputs_and_no_others(activation, dtype):
    x = draw(dtype, 9, 5)
    x[4, 2] = np.nan
    found = forward(x, draw(dtype, 5, 21), draw(dtype, 21), activation)
    assert np.isnan(found).all(1).tolist() == [row == 4 for row in range(9)]
    assert np.isnan(found).sum() == 21


@each_dtype
@pytest.mark.parametrize("edges", [(0, 64, 130), (0, 1, 17, 50, 130), (0, 130)])
def test_parts_put_together_have_the_bits_of_the_whole_and_touch_nothing_else(edges, dtype):
    x, weight, bias, delta = draw(dtype, 35, 130), draw(dtype, 130, 130), draw(dtype, 130), draw(dtype, 35, 130)
    hidden = np.tanh(draw(dtype, 35, 130, seed=1))
    outputs, (gradient, sums) = forward(x, weight, bias, TANH), weight_gradient(x, delta)
    inputs = input_gradient(delta, weight, TANH, hidden)
    for begin, end in pairwise(edges):
        inside = np.zeros(130, bool)
        inside[begin:end] = True
        part = forward(x, weight, bias, TANH, begin, end)
        assert np.array_equal(part[:, inside], outputs[:, inside])
        assert np.isnan(part[:, ~inside]).all()
        part, part_sums = weight_gradient(x, delta, begin, end)
        assert np.array_equal(part[inside], gradient[inside])
        assert np.isnan(part[~inside]).all()
        assert np.array_equal(part_sums, sums) if end == 130 else np.isnan(part_sums).all()
        part = input_gradient(delta, weight, TANH, hidden, begin, end)
        assert np.array_equal(part[:, inside], inputs[:, inside])
        assert np.array_equal(part[:, ~inside], hidden[:, ~inside])


@each_dtype
@pytest.mark.parametrize("edges", [(600, 560, 20, 0), (600, 599, 1, 0), (600, 300, 0)])
def test_parts_from_one_packing_have_the_bits_of_the_whole(edges, dtype):
    """Later parts may be larger than the first one, which packs; they leave the sums of the rows alone."""
    x, delta = draw(dtype, 35, 600), draw(dtype, 35, 70)
    gradient, sums = weight_gradient(x, delta)
    grad, bias = blank(gradient.shape, x.dtype), blank(sums.shape, x.dtype)
    work = scratch(kernels.weight_gradient_scratch(*delta.shape, x.itemsize), x.dtype)
    for end, begin in pairwise(edges):
        kernels.weight_gradient(x, delta, grad, bias, end != 600, work, begin, end)
        assert np.array_equal(grad[begin:], gradient[begin:])
        assert np.array_equal(bias, sums)
        assert np.isnan(grad[:begin]).all()
    assert intact(x, delta, grad, bias, work)


@each_dtype
def test_the_bits_of_a_row_do_not_depend_on_how_many_rows_there_are(dtype):
    x, weight, bias = draw(dtype, 260, 150), draw(dtype, 150, 70), draw(dtype, 70)
    whole = forward(x, weight, bias, TANH)
    for rows in (1, 2, 8, 17):
        assert np.array_equal(forward(guarded(x[-rows:]), weight, bias, TANH), whole[-rows:])


@each_dtype
def test_bits_repeat_here_and_in_another_process(command, dtype):
    own = digest_dense(dtype)
    assert digest_dense(dtype) == own
    code = f"from harness.kernel_calls import digest_dense; print(digest_dense('{dtype}'))"
    assert command(sys.executable, "-c", code, cwd=Path(__file__).parents[1]).stdout.strip() == own
