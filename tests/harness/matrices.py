"""Matrices for the tests of decompositions, and what numpy makes of them."""

from __future__ import annotations

import numpy as np
import pytest

SOLVERS = ["gram", "subsample", "vr", "krylov"]
DTYPES = ["float32", "float64"]
LOOSE = {"float32": 3e-4, "float64": 1e-8}


def rows_of_all(n, d, seed=0, dtype="float64", mean=3.0):
    """Rows with a decaying spectrum, away from the origin."""
    rng = np.random.default_rng(seed)
    turned = np.linalg.qr(rng.standard_normal((d, d)))[0]
    x = rng.standard_normal((n, d)) * (1 + np.arange(d) / 2) ** -1.0 @ turned + mean * rng.standard_normal(d)
    return x.astype(dtype)


DEALS = {
    "even": lambda n, size: np.arange(n) * size // max(n, 1),
    "round robin": lambda n, size: np.arange(n) % size,
    "all on the last": lambda n, size: np.full(n, size - 1),
    "one on the first": lambda n, size: np.where(np.arange(n) == 0, 0, size - 1),
}


def mine(x, comm, deal="even"):
    return x[DEALS[deal](len(x), comm.size) == comm.rank]


def exact(x, center=True, weights=None):
    """Eigenvalues and eigenvectors (rows) of sum of s (x - m) (x - m)^T / sum of s, with scikit-learn's signs; and the mean."""
    x = x.astype(float)
    weights = np.ones(len(x)) if weights is None else weights.astype(float)
    mean = weights @ x / weights.sum() if center else np.zeros(x.shape[1])
    _, sizes, vectors = np.linalg.svd(np.sqrt(weights)[:, None] * (x - mean), full_matrices=False)
    largest = np.abs(vectors).argmax(axis=1)
    return sizes**2 / weights.sum(), vectors * np.sign(vectors[np.arange(len(vectors)), largest])[:, None], mean


def check(pca, x, k, dtype, weights=None, near=None):
    values, vectors, mean = exact(x, True, weights)
    total = len(x) if weights is None else weights.sum()
    scale, near = total / (total - 1), near or LOOSE[dtype]
    np.testing.assert_allclose(pca.explained_variance_, values[:k] * scale, rtol=near, atol=near * values[0])
    np.testing.assert_allclose(pca.components_, vectors[:k], atol=30 * near)
    np.testing.assert_allclose(pca.mean_, mean, rtol=near, atol=near)
    np.testing.assert_allclose(pca.explained_variance_ratio_, values[:k] / values.sum(), rtol=near, atol=near)
    sizes = np.sqrt(values * total)
    np.testing.assert_allclose(pca.singular_values_, sizes[:k], rtol=near, atol=near * sizes[0])
    assert pca.components_.dtype == pca.mean_.dtype == dtype


def write_hdf5(path, x):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file["group/x"] = x
