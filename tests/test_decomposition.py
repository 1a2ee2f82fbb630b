"""PCA and TruncatedSVD: every solver against numpy's SVD of all rows, on any number of ranks and however rows are dealt."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse
import sklearn.decomposition
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from mpiddl.decomposition import PCA, TruncatedSVD
from mpiddl.errors import ConvergenceError, MismatchError, MpiddlError
from mpiddl.layout import block
from mpiddl.transport import virtual

EVERYWHERE = pytest.mark.mpi(min_size=1)
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


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("solver", ["auto", *SOLVERS])
@pytest.mark.parametrize(("n", "d", "k"), [(400, 30, 4), (1000, 90, 6), (37, 100, 3)])
def test_components_are_those_of_all_rows(comm, n, d, k, solver, dtype):
    x = rows_of_all(n, d, dtype=dtype)
    pca = PCA(k, solver=solver, tol=1e-15, random_state=0, comm=comm).fit(mine(x, comm))
    check(pca, x, k, dtype)
    values = exact(x)[0]
    assert pca.noise_variance_ == pytest.approx(values[k:].sum() * n / (n - 1) / (min(n, d) - k), rel=LOOSE[dtype])
    assert (pca.n_samples_, pca.n_features_in_, pca.n_components_) == (n, d, k)


@EVERYWHERE
@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_however_rows_are_dealt(comm, solver, deal):
    x = rows_of_all(301, 40)
    pca = PCA(3, solver=solver, tol=1e-15, random_state=0, comm=comm).fit(mine(x, comm, deal))
    check(pca, x, 3, "float64")
    assert len(set(comm.allgather(pca.components_.tobytes()))) == 1


@EVERYWHERE
@pytest.mark.parametrize("solver", SOLVERS)
def test_weights_count_rows(comm, solver):
    x, weights = rows_of_all(200, 25), np.random.default_rng(1).integers(0, 4, 200).astype(float)
    own = DEALS["round robin"](200, comm.size) == comm.rank
    pca = PCA(3, solver=solver, tol=1e-15, random_state=0, comm=comm).fit(x[own], sample_weight=weights[own])
    check(pca, np.repeat(x, weights.astype(int), axis=0), 3, "float64")
    check(pca, x, 3, "float64", weights)


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("solver", ["auto", *SOLVERS])
def test_truncated_svd(comm, solver, dtype):
    x = rows_of_all(300, 40, dtype=dtype)
    svd = TruncatedSVD(5, solver=solver, tol=1e-14, random_state=0, comm=comm).fit(mine(x, comm))
    values, vectors, _ = exact(x, center=False)
    near = LOOSE[dtype]
    np.testing.assert_allclose(svd.singular_values_, np.sqrt(values[:5] * 300), rtol=30 * near)
    np.testing.assert_allclose(np.abs(np.diag(svd.components_ @ vectors[:5].T)), 1, rtol=30 * near)
    scores = svd.transform(x)
    np.testing.assert_allclose(svd.explained_variance_, scores.var(axis=0), rtol=100 * near)
    np.testing.assert_allclose(svd.explained_variance_ratio_, scores.var(axis=0) / x.var(axis=0).sum(), rtol=100 * near)
    theirs = sklearn.decomposition.TruncatedSVD(5, algorithm="arpack").fit(x.astype(float))
    np.testing.assert_allclose(svd.explained_variance_, theirs.explained_variance_, rtol=100 * near)


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("solver", ["auto", "gram", "subsample", "krylov"])
@pytest.mark.parametrize("kind", [PCA, TruncatedSVD])
def test_sparse_rows(comm, kind, solver, dtype):
    x = scipy.sparse.random_array((300, 60), density=0.1, rng=np.random.default_rng(0)).toarray().astype(dtype)
    x *= (1 + np.arange(60) / 4) ** -1.0
    weights = np.random.default_rng(1).integers(1, 4, 300).astype(dtype)
    own = DEALS["round robin"](300, comm.size) == comm.rank
    settings = {"n_components": 4, "solver": solver, "tol": 1e-13, "random_state": 0, "comm": comm}
    sparse = kind(**settings).fit(scipy.sparse.csr_array(x[own]), sample_weight=weights[own])
    dense = kind(**settings).fit(x[own], sample_weight=weights[own])
    near = LOOSE[dtype]
    np.testing.assert_allclose(sparse.singular_values_, dense.singular_values_, rtol=near)
    np.testing.assert_allclose(sparse.explained_variance_ratio_, dense.explained_variance_ratio_, rtol=10 * near)
    np.testing.assert_allclose(sparse.components_, dense.components_, atol=100 * near)
    np.testing.assert_allclose(sparse.transform(scipy.sparse.csr_matrix(x)), dense.transform(x), atol=100 * near)


@EVERYWHERE
def test_sparse_rows_that_make_no_sense(comm):
    x = scipy.sparse.csr_array(np.eye(30))
    with pytest.raises(ValueError, match="solver: got vr for sparse rows"):
        PCA(2, solver="vr", comm=comm).fit(x)
    x.data[7] = np.nan
    with pytest.raises(ValueError, match="Input X contains NaN: row 7, column 7"):
        PCA(2, comm=comm).fit(x)


@pytest.mark.parametrize("whiten", [False, True])
def test_scores_and_rows_back_are_scikit_learns(whiten):
    x = rows_of_all(200, 20)
    ours = PCA(6, whiten=whiten).fit(x)
    theirs = sklearn.decomposition.PCA(6, whiten=whiten, svd_solver="full").fit(x)
    np.testing.assert_allclose(ours.transform(x), theirs.transform(x), atol=1e-10)
    scores = theirs.transform(x)
    np.testing.assert_allclose(ours.inverse_transform(scores), theirs.inverse_transform(scores), atol=1e-10)
    if not whiten:  # with it, scikit-learn's is no covariance of the rows
        np.testing.assert_allclose(ours.get_covariance(), theirs.get_covariance(), atol=1e-12)
    assert list(ours.get_feature_names_out()) == [f"pca{i}" for i in range(6)]


@EVERYWHERE
@pytest.mark.parametrize("solver", ["auto", "krylov"])
def test_a_share_of_the_variance(comm, solver):
    x = rows_of_all(500, 60)
    pca = PCA(0.8, solver=solver, tol=1e-12, comm=comm).fit(mine(x, comm))
    assert pca.n_components_ == sklearn.decomposition.PCA(0.8, svd_solver="full").fit(x).n_components_
    check(pca, x, pca.n_components_, "float64")


@EVERYWHERE
@pytest.mark.parametrize(("n", "d"), [(50, 8), (6, 30)])
def test_all_components(comm, n, d):
    x = rows_of_all(n, d)
    pca = PCA(comm=comm).fit(mine(x, comm))
    rank = min(n - 1, d)
    assert pca.n_components_ == min(n, d)
    np.testing.assert_allclose(pca.components_[:rank], exact(x)[1][:rank], atol=1e-6)
    np.testing.assert_allclose(pca.components_ @ pca.components_.T, np.eye(min(n, d)), atol=1e-10)
    np.testing.assert_allclose(pca.inverse_transform(pca.transform(x)), x, atol=1e-8)


@EVERYWHERE
@pytest.mark.parametrize("solver", SOLVERS)
def test_repeated_eigenvalues_give_the_right_space(comm, solver):
    values = np.array([4.0, 4, 4, *np.full(37, 1.0)])
    z = np.random.default_rng(0).standard_normal((400, 40))
    z -= z.mean(0)
    x = np.linalg.qr(z)[0] * np.sqrt(values * 400)
    pca = PCA(3, solver=solver, tol=1e-12, random_state=0, comm=comm).fit(mine(x, comm))
    np.testing.assert_allclose((pca.components_[:, :3] ** 2).sum(), 3, rtol=1e-6)
    np.testing.assert_allclose(pca.explained_variance_ * 399 / 400, 4, rtol=1e-8)


@EVERYWHERE
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("value", [0.0, 7.0, 0.1, 288.15])
@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_rows_have_no_variance(comm, solver, value, dtype):
    pca = PCA(2, solver=solver, random_state=0, comm=comm).fit(np.full((200, 90), value, dtype))
    np.testing.assert_allclose(pca.explained_variance_, 0, atol=1e-20)
    np.testing.assert_allclose(pca.components_ @ pca.components_.T, np.eye(2), atol=max(1e-8, np.finfo(dtype).eps))
    np.testing.assert_array_equal(pca.explained_variance_ratio_, 0)


@EVERYWHERE
@pytest.mark.parametrize("solver", ["subsample", "vr", "krylov"])
@pytest.mark.parametrize("tol", [1e-2, 1e-5, 1e-9])
def test_the_tolerance_is_kept_and_variance_never_falls(comm, solver, tol):
    x = rows_of_all(3000, 80)
    pca = PCA(5, solver=solver, tol=tol, random_state=1, comm=comm).fit(mine(x, comm))
    values = exact(x)[0]
    missed = values[:5].sum() - (np.var(x @ pca.components_.T, axis=0)).sum()
    assert missed <= tol * values[:5].sum()
    assert missed <= pca.explained_variance_error_.sum() + 1e-12
    explained = [moment.explained for moment in pca.history_]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(explained))
    assert pca.history_[-1].error <= tol


def heavy(rng, x):
    x[rng.choice(len(x), 5)] *= 100
    return x


def rare(rng, x):
    """A direction of which two rows of three thousand tell, and that explains as much as the first."""
    some = rng.choice(len(x), 2, replace=False)
    x[some] += 1.2 * np.sqrt(len(x) / 2) * np.linalg.qr(rng.standard_normal((x.shape[1], 1)))[0][:, 0]
    return x


def classes(rng, x):
    return np.sort(rng.integers(0, 10, len(x)))[:, None] * 0.1 + x


def walk(rng, x):
    return np.cumsum(x, axis=0) / 30


ROWS = {"alike": lambda rng, x: x, "heavy": heavy, "rare": rare, "sorted": classes, "walk": walk}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("solver", ["auto", "subsample", "vr", "krylov"])
@pytest.mark.parametrize("k", [1, 6])
@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-7])
def test_the_tolerance_is_kept_whatever_the_rows(kind, solver, k, tol):
    """Of rows that samples tell little about, too."""
    rng = np.random.default_rng(3)
    x = ROWS[kind](rng, rng.standard_normal((3000, 100)) * (1 + np.arange(100) / 3) ** -0.5)
    pca = PCA(k, solver=solver, tol=tol, random_state=0, threads=1).fit(x)
    values = exact(x)[0]
    explained = ((x - x.mean(axis=0)) @ pca.components_.T).var(axis=0).sum()
    assert 1 - explained / values[:k].sum() <= tol


def one_hot(n, d):
    return lambda seed: np.eye(d)[np.random.default_rng(seed).integers(d, size=n)]


def white(seed):
    return np.random.default_rng(seed).standard_normal((3000, 400))


def outliers(seed):
    rng = np.random.default_rng(seed)
    return scipy.sparse.random(6000, 300, density=0.02, random_state=seed, data_rvs=lambda n: rng.pareto(1.5, n)).tocsr()


@pytest.mark.parametrize("solver", ["subsample", "vr", "krylov"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("make", "k", "tol"), [(one_hot(5000, 200), 60, 1e-6), (one_hot(700, 53), 26, 1e-12),
                                                (one_hot(20_000, 100), 5, 1e-6), (outliers, 3, 0.2), (outliers, 3, 0.01),
                                                (white, 5, 0.02), (white, 5, 1e-3)])  # fmt: skip
@pytest.mark.parametrize("seed", [1])
def test_the_tolerance_is_kept_where_no_component_stands_out(solver, ranks, make, k, tol, seed):
    """A sample's components may then be components of all rows, and not the largest: no residual tells."""
    x = make(seed)
    if scipy.sparse.issparse(x) and solver != "krylov":
        pytest.skip("not for sparse rows")
    dense = x.toarray() if scipy.sparse.issparse(x) else x

    def program(comm):
        own = block(len(dense), comm.size, comm.rank)
        return PCA(k, solver=solver, tol=tol, random_state=seed, comm=comm, threads=1).fit(x[own.start : own.stop])

    pca = virtual.run(ranks, program)[0]
    explained = ((dense - dense.mean(axis=0)) @ pca.components_.T).var(axis=0).sum()
    assert 1 - explained / exact(dense)[0][:k].sum() <= tol


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("k", [1, 3, 10])
def test_equal_eigenvalues_are_all_found(k, seed):
    x = np.linalg.qr(np.random.default_rng(seed).standard_normal((500, 40)))[0]
    pca = PCA(k, solver="gram", random_state=0, threads=1).fit(x)
    assert pca.components_.shape == (k, 40)
    np.testing.assert_allclose(pca.explained_variance_, 1 / 499, rtol=0.1)


@pytest.mark.parametrize("solver", ["krylov", "subsample", "vr"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_fewer_dimensions_than_components(solver, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((900, 3)) @ rng.standard_normal((3, 100))
    for rows, k in ((x, 10), (x[:5, :7], 1), (np.outer(x[:5, 0], x[:7, 1]), 1)):
        pca = PCA(k, solver=solver, tol=1e-3, random_state=seed, threads=1).fit(rows)
        assert 1 - pca.explained_variance_.sum() / np.var(rows, axis=0, ddof=1).sum() < 0.6 if k == 1 else 1e-3


def test_steepest_ascent_where_a_sample_sees_no_maximum():
    from mpiddl.decomposition.subsample import solve

    right = np.ones((4, 2), np.float32)
    np.testing.assert_array_equal(solve(lambda z: -z, right, 6), right)


@EVERYWHERE
@pytest.mark.parametrize("solver", ["auto", "gram", "subsample", "vr", "krylov"])
@pytest.mark.parametrize("value", [1e20, 9.969e36, 1e90, 1e150])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_fill_values_among_the_rows(comm, solver, value):
    x = rows_of_all(8000, 60)
    x[np.random.default_rng(9).random(len(x)) < 0.004, 5] = value
    pca = PCA(3, solver=solver, tol=1e-6, random_state=0, comm=comm, threads=1)
    if value < 1e60:
        pca.fit(mine(x, comm))
        np.testing.assert_allclose(np.abs(pca.components_[0, 5]), 1, rtol=1e-6)
    else:
        with pytest.raises(ValueError, match="too large to be squared"):
            pca.fit(mine(x, comm))


@EVERYWHERE
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_units_whose_squares_no_float_holds(comm):
    x = mine(rows_of_all(500, 40), comm)
    small = PCA(3, random_state=0, comm=comm).fit(x * 1e-300)
    np.testing.assert_allclose(small.components_ @ small.components_.T, np.eye(3), atol=1e-8)
    with pytest.raises(ValueError, match="too large to be squared"):
        PCA(3, random_state=0, comm=comm).fit(x * 1e290)
    single = PCA(3, random_state=0, comm=comm).fit((x * 1e20).astype(np.float32))
    assert np.isfinite(single.explained_variance_).all() and single.components_.dtype == np.float32


def test_a_look_at_held_out_rows_saves_a_pass():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((20_000, 100)) * (1 + np.arange(100) / 3) ** -1.0
    assert PCA(6, solver="krylov", tol=1e-3, random_state=0).fit(x).n_passes_ < 1.5
    assert PCA(6, solver="krylov", tol=1e-3, random_state=0).fit(heavy(rng, x)).n_passes_ > 2


@EVERYWHERE
@pytest.mark.parametrize("settings", [{"sync_every": 3}, {"sync_every": 2, "sync_delay": 1}, {"sync_every": 2, "sync_delay": 5},
                                      {"batch_size": 24, "step_size": 3.0}, {"vr_fraction": 2.0},
                                      {"snapshot_fraction": 0.3}])  # fmt: skip
def test_variance_reduction_with_any_settings(comm, settings):
    x = rows_of_all(600, 50)
    pca = PCA(4, solver="vr", tol=1e-12, random_state=0, comm=comm, **settings).fit(mine(x, comm, "round robin"))
    check(pca, x, 4, "float64", near=1e-6)


def shamirs(gap, n=10_000, d=100):
    """The matrix of Shamir 2015, section 4: five singular values close behind the first, the rest small."""
    rng = np.random.default_rng(1)
    close = 1 - gap * np.array([0, 1, 1.1, 1.2, 1.3, 1.4])
    sizes = np.concatenate([close, np.abs(rng.standard_normal(d - 6)) / d])
    left, right = (np.linalg.qr(rng.standard_normal((m, d)))[0] for m in (n, d))
    return left * sizes @ right.T


@EVERYWHERE
@pytest.mark.parametrize(("gap", "decades", "epochs"), [(0.16, 1.5, 6), (0.05, 1.0, 9), (0.016, 0.3, 25)])
def test_vr_plain_converges_as_published_on_any_number_of_ranks(comm, gap, decades, epochs):
    """The paper's figures are 2.2, 1.4 and 0.45 decades an epoch; a rank's steps are P times longer, and P times fewer."""
    x = shamirs(gap)
    svd = TruncatedSVD(1, solver="vr-plain", tol=1e-15, max_passes=2 * epochs, random_state=0, comm=comm)
    with pytest.raises(ConvergenceError):
        svd.fit(mine(x, comm, "round robin"))
    error = np.log10(1 - np.array([moment.explained for moment in svd.history_]) * len(x))
    falling = error[error < -1]
    falling = falling[: np.argmax(falling < -12) or None]
    assert (falling[0] - falling[-1]) / (len(falling) - 1) > decades


@EVERYWHERE
def test_vr_plain_of_several_components(comm):
    x = rows_of_all(400, 12)
    pca = PCA(2, solver="vr-plain", tol=1e-7, max_passes=60, random_state=0, comm=comm).fit(mine(x, comm))
    check(pca, x, 2, "float64", near=3e-5)


@pytest.mark.parametrize("delay", [1, 2])
def test_a_late_average_costs_no_more_than_a_pass(delay):
    """Four virtual ranks with alike rows, averaged four times between passes."""
    x = rows_of_all(4000, 60)

    def program(comm, delay):
        settings = {"solver": "vr", "tol": 1e-9, "random_state": 0, "sync_every": 8, "batch_size": 32, "vr_fraction": 1.0}
        return PCA(3, sync_delay=delay, comm=comm, **settings).fit(mine(x, comm, "round robin")).n_passes_

    with_delay, without = (virtual.run(4, lambda comm, late=late: program(comm, late))[0] for late in (delay, 0))
    assert with_delay <= without + 2  # a pass, and its share of steps


@EVERYWHERE
@pytest.mark.parametrize("solver", ["auto", *SOLVERS])
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e-30), ("float32", 1e17), ("float64", 1e-140), ("float64", 1e-21),
                                              ("float64", 1e140)])  # fmt: skip
def test_any_units(comm, solver, dtype, scale):
    x = rows_of_all(500, 70)
    own = (mine(x, comm) * scale).astype(dtype)
    pca = PCA(3, solver=solver, tol=1e-10, random_state=0, comm=comm).fit(own)
    values, vectors, _ = exact(x)
    np.testing.assert_allclose(pca.singular_values_.astype(float) / scale, np.sqrt(values[:3] * 500), rtol=1e-4)
    np.testing.assert_allclose(pca.components_, vectors[:3], atol=1e-3)
    sparse = TruncatedSVD(3, solver="krylov", tol=1e-10, comm=comm).fit(scipy.sparse.csr_array(own))
    np.testing.assert_allclose(sparse.singular_values_.astype(float) / scale, np.sqrt(exact(x, False)[0][:3] * 500), rtol=1e-4)


@EVERYWHERE
@pytest.mark.parametrize("solver", ["auto", *SOLVERS])
@pytest.mark.parametrize(("dtype", "mean"), [("float32", 1e4), ("float64", 1e9)])
def test_rows_far_from_zero(comm, solver, dtype, mean):
    x = (rows_of_all(2000, 80, mean=0) + mean).astype(dtype)
    pca = PCA(3, solver=solver, random_state=0, comm=comm).fit(mine(x, comm))
    values, vectors, _ = exact(x.astype(float) - mean)
    np.testing.assert_allclose(pca.explained_variance_ * 1999 / 2000, values[:3], rtol=1e-5)
    np.testing.assert_allclose(np.abs(np.sum(pca.components_ * vectors[:3], axis=1)), 1, rtol=1e-5)
    np.testing.assert_allclose(pca.mean_, x.mean(axis=0, dtype=float), rtol=1e-6)


@EVERYWHERE
@pytest.mark.parametrize("setting", [{"tol": 1e-3}, {"solver": "krylov"}, {"n_components": 4}, {"sync_every": 3},
                                     {"whiten": True}])  # fmt: skip
def test_ranks_with_different_settings(comm, setting):
    if comm.size == 1:
        pytest.skip("takes two")
    given = {"n_components": 3, "solver": "vr", **(setting if comm.rank else {})}
    with pytest.raises(MismatchError, match=f"PCA: got .*{next(iter(setting))}|{next(iter(setting))}"):
        PCA(comm=comm, **given).fit(rows_of_all(100, 20))


@EVERYWHERE
def test_a_seed_that_makes_no_sense(comm):
    with pytest.raises(ValueError, match="cannot be used to seed"):
        PCA(2, random_state="abc", comm=comm).fit(rows_of_all(100, 20))


@pytest.mark.parametrize("solver", ["vr", "vr-plain", "krylov"])
def test_large_weights_take_no_longer(solver):
    x = rows_of_all(2000, 30)
    settings = {"n_components": 2, "solver": solver, "tol": 1e-6, "random_state": 0}
    passes = [PCA(**settings).fit(x, sample_weight=np.full(2000, weight)).n_passes_ for weight in (1.0, 1e7)]
    assert passes[1] <= passes[0] + 1.5


def test_weights_that_do_not_count_rows():
    with pytest.raises(ValueError, match="weights whose sum is 1, wanted 2 or more"):
        PCA(2).fit(rows_of_all(100, 20), sample_weight=np.full(100, 0.01))


def test_entries_given_twice_are_added():
    rng = np.random.default_rng(0)
    rows, columns, values = rng.integers(0, 80, 3000), rng.integers(0, 40, 3000), rng.random(3000)
    starts = np.searchsorted(np.sort(rows), np.arange(81))
    double = scipy.sparse.csr_array((values, columns, starts), shape=(80, 40))
    pca = PCA(3, solver="krylov", tol=1e-12).fit(double)
    np.testing.assert_allclose(pca.explained_variance_ratio_, PCA(3).fit(double.toarray()).explained_variance_ratio_, rtol=1e-8)


@EVERYWHERE
@pytest.mark.parametrize("kind", [PCA, TruncatedSVD])
@pytest.mark.parametrize("weighted", [False, True])
def test_batches_one_after_the_other(comm, kind, weighted):
    x = rows_of_all(600, 30)
    x[:, 10:] *= 1e-3
    weights = np.random.default_rng(1).integers(1, 4, 600).astype(float) if weighted else np.ones(600)
    settings = {"n_components": 3, "tol": 1e-13, "random_state": 0, "comm": comm}
    stream, whole = kind(**settings), kind(**settings)
    for batch in np.array_split(np.arange(600), [40, 41, 300]):
        own = batch[DEALS["round robin"](len(batch), comm.size) == comm.rank]
        stream.partial_fit(x[own], sample_weight=weights[own] if weighted else None)
    own = DEALS["round robin"](600, comm.size) == comm.rank
    whole.fit(x[own], sample_weight=weights[own])
    for name in ("singular_values_", "explained_variance_", "explained_variance_ratio_"):
        np.testing.assert_allclose(getattr(stream, name), getattr(whole, name), rtol=1e-2, err_msg=name)
    np.testing.assert_allclose(stream.components_, whole.components_, atol=5e-2)
    assert stream.n_samples_ == 600
    if kind is PCA:
        np.testing.assert_allclose(stream.mean_, whole.mean_, atol=1e-10)
        np.testing.assert_allclose(stream.noise_variance_, whole.noise_variance_, rtol=1e-2)
    np.testing.assert_allclose(stream.fit(x[own], sample_weight=weights[own]).components_, whole.components_, atol=1e-10)


@EVERYWHERE
def test_a_stream_that_keeps_all_directions_loses_nothing(comm):
    x = rows_of_all(200, 6)
    stream = PCA(3, comm=comm)
    for batch in np.array_split(np.arange(200), 7):
        stream.partial_fit(x[batch][comm.rank :: comm.size])
    check(stream, x, 3, "float64")


def test_streams_that_make_no_sense():
    for pca, x, message in [
        (PCA(0.5), np.eye(5), "partial_fit wants a number"),
        (PCA(4), np.eye(5)[:2], "n_components=4 must be between 1 and"),
        (PCA(2), scipy.sparse.csr_array(np.eye(5)), "got a sparse batch"),
    ]:
        with pytest.raises(ValueError, match=message):
            pca.partial_fit(x)
    with pytest.raises(ValueError, match="expecting 5 features"):
        PCA(2).partial_fit(np.eye(5)).partial_fit(np.eye(4))


@EVERYWHERE
def test_the_same_seed_gives_the_same_bits(comm):
    x = rows_of_all(600, 70)
    found = [PCA(4, solver="vr", tol=1e-8, random_state=3, comm=comm).fit(mine(x, comm)).components_ for _ in range(2)]
    np.testing.assert_array_equal(*found)


@EVERYWHERE
def test_what_cannot_be_met_is_an_error_that_carries_the_best(comm):
    x = rows_of_all(900, 80)
    pca = PCA(4, solver="krylov", tol=1e-14, max_passes=2, random_state=0, comm=comm)
    with pytest.raises(ConvergenceError, match=r"krylov: missed about .* wanted 1e-14") as caught:
        pca.fit(mine(x, comm))
    assert caught.value.best.components.shape == pca.components_.shape == (4, 80)


@EVERYWHERE
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_components": 31}, "n_components=31 must be between 1 and min"),
        ({"n_components": 0}, "n_components=0 must be"),
        ({"n_components": 1.5}, r"n_components=1\.5 must be"),
        ({"n_components": True}, "n_components=True must be"),
        ({"n_components": "mle"}, "n_components='mle' must be"),
        ({"solver": "full"}, "solver: got 'full', wanted one of auto"),
        ({"tol": -1.0}, "tol: got -1.0"),
        ({"max_passes": 0}, "max_passes: got 0"),
        ({"solver": "vr", "sync_delay": -1}, "sync_delay: got -1"),
        ({"solver": "vr", "snapshot_fraction": 0}, "snapshot_fraction: got 0"),
        ({"solver": "vr", "batch_size": 2.5}, "batch_size: got 2.5"),
        ({"solver": "vr", "step_size": 0.0}, "step_size: got 0.0"),
        ({"threads": -1}, "threads: got -1"),
    ],
)
def test_settings_that_make_no_sense(comm, settings, message):
    with pytest.raises(ValueError, match=message):
        PCA(**{"n_components": 2, **settings}, comm=comm).fit(mine(rows_of_all(100, 30), comm))


@EVERYWHERE
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_found_where_it_is(comm, solver, bad):
    x = rows_of_all(100, 20)
    last = comm.size - 1
    if comm.rank == last:
        x[17, 3] = bad
    word = "NaN" if np.isnan(bad) else "infinity"
    with pytest.raises(ValueError, match=f"Input X contains {word}: row 17, column 3"):
        PCA(2, solver=solver, comm=comm).fit(x)


@EVERYWHERE
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.ones((5, 4), complex), "[Cc]omplex"),
        (np.ones(5), "1D array"),
        (np.array([["a"] * 4]), "string|convert"),
        (np.ones((5, 0)), "0 feature"),
    ],
)
def test_one_ranks_wrong_input_is_everybodys_error(comm, bad, message):
    x = bad if comm.rank == comm.size - 1 else np.random.default_rng(0).random((50, 4))
    with pytest.raises(ValueError, match=message):
        PCA(2, comm=comm).fit(x)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("odd", "message"), [(np.ones((5, 3)), "columns"), (np.ones((5, 4), "float32"), "dtype")])
def test_ranks_with_other_columns_or_dtypes(comm, odd, message):
    with pytest.raises(MismatchError, match=message):
        PCA(2, comm=comm).fit(odd if comm.rank else np.ones((5, 4)))


@EVERYWHERE
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.zeros(9), "no rows on any rank whose sample_weight is not zero"),
        (-np.ones(9), "negative weights"),
        (np.ones(8), "got shape"),
        (np.full(9, np.nan), "NaN"),
    ],
)
def test_weights_that_make_no_sense(comm, weights, message):
    with pytest.raises(ValueError, match=message):
        PCA(2, comm=comm).fit(np.random.default_rng(0).random((9, 4)), sample_weight=weights)


def test_no_rows_at_all():
    with pytest.raises(ValueError, match="minimum of 1 is required"):
        PCA(2).fit(np.empty((0, 4)))


@pytest.mark.mpi(min_size=2)
def test_no_rows_on_any_rank(comm):
    with pytest.raises(MpiddlError, match="no rows on any rank"):
        PCA(2, comm=comm).fit(np.empty((0, 4)))


@EVERYWHERE
def test_a_clone_shares_the_communicator_and_a_pickle_leaves_it_out(comm):
    pca = PCA(2, comm=comm).fit(mine(rows_of_all(60, 12), comm))
    assert clone(pca).comm is pca.comm is comm
    again = pickle.loads(pickle.dumps(pca))
    assert again.comm is None
    np.testing.assert_array_equal(again.components_, pca.components_)


def test_in_a_pipeline():
    x = rows_of_all(120, 12)
    ours = make_pipeline(StandardScaler(), PCA(3)).fit_transform(x)
    theirs = make_pipeline(StandardScaler(), sklearn.decomposition.PCA(3)).fit_transform(x)
    np.testing.assert_allclose(ours, theirs, atol=1e-8)


UNLIKE = {
    f"check_sample_weight_equivalence_on_{kind}_data": "n_components=None counts rows, whatever their weights"
    for kind in ("dense", "sparse")
}


@parametrize_with_checks(
    [
        PCA(),
        PCA(n_components=2),
        PCA(n_components=1, solver="krylov"),
        PCA(n_components=1, whiten=True),
        TruncatedSVD(n_components=1),
    ],
    expected_failed_checks=lambda estimator: UNLIKE if estimator.n_components is None else {},
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)
