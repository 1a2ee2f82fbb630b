"""Passes over rows and mini-batch steps against numpy in float64, between guard bytes that must not be touched."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from harness.kernel_calls import blank, close, draw, guarded, intact

from mpiddl.kernels.rows.correction_steps import correction_steps, steps_scratch
from mpiddl.kernels.rows.normal_product import BLOCK, FLUSH, normal_product, normal_scratch, padded_columns
from mpiddl.kernels.rows.sparse_product import sparse_moments, sparse_product, sparse_scratch

pytestmark = pytest.mark.no_mpi

DTYPES = ["float32", "float64"]
SHAPES = [(0, 3, 1), (1, 1, 1), (2, 5, 3), (BLOCK - 1, 13, 7), (BLOCK + 1, 40, 17), (100, 7, 30), (61, 5000, 9),
          (FLUSH + 5, 3, 60)]  # fmt: skip
STEPS = [(40, 9, 3, 48), (49, 30, 20, 48), (5, 4, 1, 24), (100, 33, 9, 72)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "d", "k"), SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_pass(n, d, k, dtype, weighted):
    kind = np.dtype(dtype)
    columns = padded_columns(k, kind.itemsize)
    x, w, start = draw(dtype, n, d), draw(dtype, d, columns, seed=1), draw(dtype, columns, seed=2)
    origin, weights = draw(dtype, d, seed=3), guarded(np.abs(draw(dtype, n if weighted else 0, seed=4)))
    out, sums, moments = guarded(np.ones((d, columns))), guarded(np.ones(columns)), guarded(np.ones((2, d)))
    scratch, squares = blank(normal_scratch(d, columns, kind.itemsize), dtype), guarded(np.ones(n))
    normal_product(x, w, start, weights, origin, out, sums, moments, squares, scratch)
    assert intact(x, w, start, weights, origin, out, sums, moments, squares, scratch)

    wide = x.astype(float)
    factor = weights.astype(float)[:, None] if weighted else np.ones((n, 1))
    y = factor * (wide @ w + start)
    sizes = factor * (np.abs(wide) @ np.abs(w) + np.abs(start))
    moved = wide - origin
    eps = np.finfo(kind).eps
    assert (np.abs(out - 1 - wide.T @ y) <= 3 * (n + d + 9) * eps * (np.abs(wide).T @ sizes)).all()
    assert (np.abs(sums - 1 - y.sum(0)) <= 3 * (n + d + 9) * eps * (sizes.sum(0) + 1)).all()
    for found, power in zip(moments, (1, 2), strict=True):
        wanted = (factor * moved**power).sum(0)
        assert (np.abs(found - 1 - wanted) <= 3 * (n + 9) * eps * ((factor * np.abs(moved) ** power).sum(0) + 1)).all()
    np.testing.assert_allclose(squares, (factor * moved**2).sum(1), rtol=3 * (d + 9) * eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pass_is_the_same_in_parts_of_the_columns(dtype):
    """Each column is a sum of its own: how many are taken together does not show in its bits."""
    n, d, columns = 50, 30, 5 * padded_columns(1, np.dtype(dtype).itemsize)
    x, w = draw(dtype, n, d), draw(dtype, d, columns, seed=1)

    def run(part):
        part = np.ascontiguousarray(part)
        k = part.shape[1]
        out, scratch = np.zeros((d, k)), np.empty(normal_scratch(d, k, x.itemsize), dtype)
        none, start, origin = np.empty(0, dtype), np.zeros(k, dtype), np.zeros(d, dtype)
        normal_product(x, part, start, none, origin, out, np.zeros(k), np.zeros((0, d)), np.zeros(0), scratch)
        return out

    lanes = columns // 5
    np.testing.assert_array_equal(run(w)[:, :lanes], run(w[:, :lanes]))
    np.testing.assert_array_equal(run(w)[:, lanes:], run(w[:, lanes:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("n", "d", "k"), [(0, 3, 1), (1, 1, 1), (40, 13, 7), (30, 50, 17), (9, 200, 60)])
def test_a_pass_over_sparse_rows(n, d, k, dtype, weighted):
    columns = padded_columns(k, np.dtype(dtype).itemsize)
    dense = draw(dtype, n, d) * (draw("float64", n, d, seed=5) > 0.8)
    rows = scipy.sparse.csr_array(dense)
    starts, indices, values = guarded(rows.indptr.astype(np.int64)), guarded(rows.indices.astype(np.int32)), guarded(rows.data)
    w, start = draw(dtype, d, columns, seed=1), draw(dtype, columns, seed=2)
    weights = guarded(np.abs(draw(dtype, n if weighted else 0, seed=4)))
    out, sums, moments = guarded(np.ones((d, columns))), guarded(np.ones(columns)), guarded(np.ones((2, d)))
    scratch, squares = blank(sparse_scratch(d, columns), dtype), guarded(np.ones(n))
    sparse_product(starts, indices, values, w, start, weights, out, sums, scratch)
    sparse_moments(starts, indices, values, weights, moments, squares)
    assert intact(starts, indices, values, w, start, weights, out, sums, moments, squares, scratch)

    wide, factor = dense.astype(float), weights.astype(float)[:, None] if weighted else np.ones((n, 1))
    y, sizes = factor * (wide @ w + start), factor * (np.abs(wide) @ np.abs(w) + np.abs(start))
    eps = 3 * (n + d + 9) * np.finfo(dtype).eps
    assert (np.abs(out - 1 - wide.T @ y) <= eps * (np.abs(wide).T @ sizes)).all()
    assert (np.abs(sums - 1 - y.sum(0)) <= eps * (sizes.sum(0) + 1)).all()
    np.testing.assert_allclose(moments - 1, [(factor * wide).sum(0), (factor * wide**2).sum(0)], atol=1e-9)
    np.testing.assert_allclose(squares, (factor * wide**2).sum(1), rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("n", "d", "k", "batch"), STEPS)
def test_steps(n, d, k, batch, dtype, weighted):
    kind, rng = np.dtype(dtype), np.random.default_rng(7)
    columns, steps, every, rate = padded_columns(k, kind.itemsize), 5, 2, 0.05
    x, mean, residual = draw(dtype, n, d), draw(dtype, d, seed=1), draw(dtype, d, columns, seed=2)
    weights = guarded(np.abs(draw(dtype, n if weighted else 0, seed=3)) + kind.type(0.1))
    w = np.zeros((d, columns))
    w[:, : min(k, d)] = np.linalg.qr(rng.standard_normal((d, min(k, d))))[0]
    w, values = guarded(w.astype(dtype)), guarded(np.linspace(3, 1, columns).astype(dtype))
    groups = guarded(rng.integers(0, -(-n // BLOCK), (steps, batch // BLOCK)) * BLOCK)
    block, sums = guarded(np.zeros((d, columns), dtype)), guarded(np.zeros(columns))
    scratch = blank(steps_scratch(d, columns), dtype)
    correction_steps(x, weights, mean, groups, rate, values, residual, w, every, block, sums, scratch)
    assert intact(x, weights, mean, residual, w, values, groups, block, scratch, sums)

    wanted = np.zeros((d, columns))
    factor = weights.astype(float) if weighted else np.ones(n)
    for step, starts in enumerate(groups, 1):
        rows = np.concatenate([np.arange(start, min(start + BLOCK, n)) for start in starts])
        moved = x[rows].astype(float) - mean
        product = moved.T @ (factor[rows, None] * (moved @ wanted)) / factor[rows].sum()
        wanted = wanted * (1 - rate * values) + rate * (product + residual)
        if step % every == 0 or step == steps:
            wanted -= w.astype(float) @ (w.T.astype(float) @ wanted)
    assert close(block, wanted, np.abs(wanted).max() + 1, 100 * batch)
