"""PCA and TruncatedSVD: every solver against numpy's SVD of all rows, on any number of ranks and however rows are dealt."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.sparse
import sklearn.decomposition
from harness.matrices import DEALS, DTYPES, LOOSE, SOLVERS, check, exact, mine, rows_of_all
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from mpiddl.decomposition import PCA, TruncatedSVD
from mpiddl.errors import MismatchError
from mpiddl.kernels.rows.normal_product import normal_product
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi


@pytest.mark.mpi
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


@pytest.mark.mpi
@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_however_rows_are_dealt(comm, solver, deal):
    x = rows_of_all(301, 40)
    pca = PCA(3, solver=solver, tol=1e-15, random_state=0, comm=comm).fit(mine(x, comm, deal))
    check(pca, x, 3, "float64")
    assert len(set(comm.allgather(pca.components_.tobytes()))) == 1


@pytest.mark.mpi
@pytest.mark.parametrize("n", [3, 301])
@pytest.mark.parametrize("kind", [PCA, TruncatedSVD])
def test_every_rank_passes_all_rows(comm, kind, n):
    x, weights = rows_of_all(n, 20), np.arange(n) + 1.0
    for rows in (x, scipy.sparse.csr_array(x), x.tolist()):
        found = kind(2, comm=comm, rows="all", random_state=0, tol=1e-12).fit(rows, sample_weight=weights)
        own = kind(2, comm=comm, random_state=0, tol=1e-12).fit(mine(x, comm), sample_weight=mine(weights, comm))
        assert found.n_samples_ == n
        np.testing.assert_allclose(found.components_, own.components_, atol=1e-6)
    if comm.size > 1:
        with pytest.raises(MismatchError, match="rows: got other data on rank 1 than on rank 0"):
            kind(2, comm=comm, rows="all").fit(x + comm.rank)


@pytest.mark.mpi
@pytest.mark.parametrize("solver", SOLVERS)
def test_weights_count_rows(comm, solver):
    x, weights = rows_of_all(200, 25), np.random.default_rng(1).integers(0, 4, 200).astype(float)
    own = DEALS["round robin"](200, comm.size) == comm.rank
    pca = PCA(3, solver=solver, tol=1e-15, random_state=0, comm=comm).fit(x[own], sample_weight=weights[own])
    check(pca, np.repeat(x, weights.astype(int), axis=0), 3, "float64")
    check(pca, x, 3, "float64", weights)


@pytest.mark.mpi
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


@pytest.mark.mpi
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


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", [PCA, TruncatedSVD])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rank_without_rows(kind, size, sparse, dtype):
    whole = rows_of_all(50, 12, dtype=dtype)

    def program(comm):
        own = whole[:0] if comm.rank else whole
        own = scipy.sparse.csr_array(own) if sparse else own
        model = kind(3, comm=comm)
        scores = model.fit_transform(own)
        assert (scores.shape, scores.dtype) == ((own.shape[0], 3), dtype)
        np.testing.assert_array_equal(model.transform(own), scores)
        back = model.inverse_transform(scores)
        assert (back.shape, back.dtype) == (own.shape, dtype)
        assert model.transform(whole[:0]).shape == (0, 3)
        assert model.inverse_transform(np.empty((0, 3))).shape == (0, 12)
        if not sparse:
            assert kind(3, comm=comm).partial_fit(own).partial_fit(own).transform(own).shape == scores.shape

    virtual.run(size, program)


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


@pytest.mark.mpi
@pytest.mark.parametrize("solver", ["auto", "krylov"])
def test_a_share_of_the_variance(comm, solver):
    x = rows_of_all(500, 60)
    pca = PCA(0.8, solver=solver, tol=1e-12, comm=comm).fit(mine(x, comm))
    assert pca.n_components_ == sklearn.decomposition.PCA(0.8, svd_solver="full").fit(x).n_components_
    check(pca, x, pca.n_components_, "float64")


@pytest.mark.mpi
@pytest.mark.parametrize(("n", "d"), [(50, 8), (6, 30)])
def test_all_components(comm, n, d):
    x = rows_of_all(n, d)
    pca = PCA(comm=comm).fit(mine(x, comm))
    rank = min(n - 1, d)
    assert pca.n_components_ == min(n, d)
    np.testing.assert_allclose(pca.components_[:rank], exact(x)[1][:rank], atol=1e-6)
    np.testing.assert_allclose(pca.components_ @ pca.components_.T, np.eye(min(n, d)), atol=1e-10)
    np.testing.assert_allclose(pca.inverse_transform(pca.transform(x)), x, atol=1e-8)


@pytest.mark.mpi
@pytest.mark.parametrize("solver", SOLVERS)
def test_repeated_eigenvalues_give_the_right_space(comm, solver):
    values = np.array([4.0, 4, 4, *np.full(37, 1.0)])
    z = np.random.default_rng(0).standard_normal((400, 40))
    z -= z.mean(0)
    x = np.linalg.qr(z)[0] * np.sqrt(values * 400)
    pca = PCA(3, solver=solver, tol=1e-12, random_state=0, comm=comm).fit(mine(x, comm))
    np.testing.assert_allclose((pca.components_[:, :3] ** 2).sum(), 3, rtol=1e-6)
    np.testing.assert_allclose(pca.explained_variance_ * 399 / 400, 4, rtol=1e-8)


def test_entries_given_twice_are_added():
    rng = np.random.default_rng(0)
    rows, columns, values = rng.integers(0, 80, 3000), rng.integers(0, 40, 3000), rng.random(3000)
    starts = np.searchsorted(np.sort(rows), np.arange(81))
    double = scipy.sparse.csr_array((values, columns, starts), shape=(80, 40))
    pca = PCA(3, solver="krylov", tol=1e-12).fit(double)
    np.testing.assert_allclose(pca.explained_variance_ratio_, PCA(3).fit(double.toarray()).explained_variance_ratio_, rtol=1e-8)


@pytest.mark.mpi
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


@pytest.mark.mpi
def test_a_stream_that_keeps_all_directions_loses_nothing(comm):
    x = rows_of_all(200, 6)
    stream = PCA(3, comm=comm)
    for batch in np.array_split(np.arange(200), 7):
        stream.partial_fit(x[batch][comm.rank :: comm.size])
    check(stream, x, 3, "float64")


@pytest.mark.no_mpi
def test_read_only_rows_compile_no_kernel_once_more():
    x = np.random.default_rng(1).standard_normal((3000, 200)).astype("float32")
    first = PCA(3, solver="krylov", random_state=0).fit(x)
    before = len(normal_product.signatures)
    x.flags.writeable = False
    again = PCA(3, solver="krylov", random_state=0).fit(x)
    assert before and len(normal_product.signatures) == before
    assert np.array_equal(first.components_, again.components_)


@pytest.mark.mpi
def test_the_same_seed_gives_the_same_bits(comm):
    x = rows_of_all(600, 70)
    found = [PCA(4, solver="vr", tol=1e-8, random_state=3, comm=comm).fit(mine(x, comm)).components_ for _ in range(2)]
    np.testing.assert_array_equal(*found)


@pytest.mark.mpi
def test_a_clone_shares_the_communicator_and_a_pickle_leaves_it_out(comm):
    pca = PCA(2, comm=comm).fit(mine(rows_of_all(60, 12), comm))
    assert clone(pca).comm is pca.comm is comm
    again = pickle.loads(pickle.dumps(pca))
    assert again.comm is None
    np.testing.assert_array_equal(again.components_, pca.components_)


class OfMany(PCA):
    """A caller's own, which hands most of what it is given to `PCA`."""

    def __init__(self, n_components=2, **others):
        super().__init__(n_components, **others)


@pytest.mark.mpi
def test_an_estimator_of_ones_own_may_take_any_keywords(comm):
    x = rows_of_all(60, 12)
    found = OfMany(3, random_state=0, comm=comm).fit(mine(x, comm))
    assert found.get_params() == {"n_components": 3}
    check(found, x, 3, "float64")


@pytest.mark.mpi
@pytest.mark.parametrize("components", [None, 2, 12, 0.9])
@pytest.mark.parametrize("columns", [10, 30])
def test_a_weight_stands_for_as_many_rows(comm, columns, components):
    """Also of rows that are fewer than columns, and of components that have no variance; weight 0 for none."""
    rng = np.random.default_rng(3)
    x, weights = rng.standard_normal((15, columns)), rng.permutation([0.0] * 6 + [1.0, 2.0, 3.0] * 3)
    wanted = min(components or 30, columns) if components != 0.9 else 0.9
    own, repeated = slice(comm.rank, None, comm.size), np.repeat(x, weights.astype(int), axis=0)
    pca = PCA(wanted if components else None, comm=comm)
    weighted = pickle.loads(pickle.dumps(pca.fit(x[own], sample_weight=weights[own])))
    pca.fit(repeated[own])
    assert weighted.n_components_ == pca.n_components_ >= (1 if components == 0.9 else min(wanted, 18))
    for name in ("components_", "explained_variance_", "noise_variance_", "mean_"):
        np.testing.assert_allclose(getattr(weighted, name), getattr(pca, name), atol=1e-9, err_msg=name)
    np.testing.assert_allclose(weighted.transform(x), pca.transform(x), atol=1e-9)
    np.testing.assert_allclose(weighted.components_ @ weighted.components_.T, np.eye(pca.n_components_), atol=1e-9)


def test_one_row_of_some_weight():
    x = np.arange(4.0)[None]
    weighted, repeated = PCA().fit(x, sample_weight=[3.0]), PCA().fit(np.repeat(x, 3, axis=0))
    assert weighted.n_components_ == repeated.n_components_ == 3
    np.testing.assert_allclose(weighted.components_, repeated.components_, atol=1e-12)


def test_a_first_batch_may_have_weights():
    x, weights = rows_of_all(40, 12), np.full(40, 2.0)
    whole = PCA().fit(x, sample_weight=weights)
    stream = PCA().partial_fit(x[:9], sample_weight=weights[:9])
    assert stream.n_components_ == 12
    stream.partial_fit(x[9:], sample_weight=weights[9:])
    np.testing.assert_allclose(stream.explained_variance_, whole.explained_variance_, atol=1e-8)


def test_in_a_pipeline():
    x = rows_of_all(120, 12)
    ours = make_pipeline(StandardScaler(), PCA(3)).fit_transform(x)
    theirs = make_pipeline(StandardScaler(), sklearn.decomposition.PCA(3)).fit_transform(x)
    np.testing.assert_allclose(ours, theirs, atol=1e-8)


@parametrize_with_checks(
    [
        PCA(),
        PCA(n_components=2),
        PCA(n_components=1, solver="krylov"),
        PCA(n_components=1, whiten=True),
        TruncatedSVD(n_components=1),
    ],
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.mpi
def test_a_generator_of_the_program_stays_alike_on_all_ranks(comm):
    state = np.random.RandomState(7)
    PCA(2, random_state=state, comm=comm).fit(np.random.default_rng(comm.rank).standard_normal((9, 4)))
    assert len(set(comm.allgather(state.randint(1 << 30)))) == 1
