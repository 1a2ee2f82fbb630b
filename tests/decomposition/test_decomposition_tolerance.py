"""The tolerance as a promise, whatever the rows; and what the laws say of how fast it is met."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import scipy.sparse
from harness.matrices import check, exact, mine, rows_of_all
from harness.tiers import more, only

from mpiddl.decomposition import PCA, TruncatedSVD
from mpiddl.decomposition.solvers.error_estimates import missed_variance
from mpiddl.decomposition.solvers.subspace import Ritz
from mpiddl.errors import ConvergenceError
from mpiddl.layout import block
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi


@pytest.mark.mpi
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


@pytest.mark.parametrize("solver", ["subsample", "vr", "krylov"])
@pytest.mark.parametrize("seed", range(4))
def test_a_direction_of_two_rows_at_right_angles_to_all_others_is_found(solver, seed):
    """Where a sample has none of the two, its components have no residual in any pass over all rows."""
    rng = np.random.default_rng(seed)
    x = np.zeros((5000, 60))
    x[:, :3] = rng.standard_normal((5000, 3)) * [3, 2, 1]
    two = rng.choice(5000, 2, replace=False)
    x[two], x[two, 50] = 0, [200, -200]
    values = PCA(3, solver=solver, tol=1e-3, random_state=0, threads=1).fit(x).explained_variance_
    np.testing.assert_allclose(values, np.linalg.eigvalsh(np.cov(x.T))[:-4:-1], rtol=1e-3)


def one_hot(n, d):
    return lambda rng: np.eye(d)[rng.integers(d, size=n)]


def white(rng):
    return rng.standard_normal((3000, 400))


def outliers(rng):
    return scipy.sparse.random(6000, 300, density=0.02, random_state=rng, data_rvs=lambda n: rng.pareto(1.5, n)).tocsr()


FLAT = [
    *product([(one_hot(5000, 200), 60, 1e-6), (one_hot(700, 53), 26, 1e-12), (one_hot(20_000, 100), 5, 1e-6), (white, 5, 0.02),
              (white, 5, 1e-3)], ["subsample", "vr", "krylov"]),
    *product([(outliers, 3, 0.2), (outliers, 3, 0.01)], ["krylov"]),
]  # fmt: skip


@pytest.mark.parametrize("ranks", [more(1), 3])
@pytest.mark.parametrize(("rows", "solver"), FLAT)
def test_the_tolerance_is_kept_where_no_component_stands_out(ranks, rows, solver):
    """A sample's components may then be components of all rows, and not the largest: no residual tells."""
    make, k, tol = rows
    x = make(np.random.default_rng(1))
    dense = x.toarray() if scipy.sparse.issparse(x) else x

    def program(comm):
        own = block(len(dense), comm.size, comm.rank)
        return PCA(k, solver=solver, tol=tol, random_state=1, comm=comm, threads=1).fit(x[own.start : own.stop])

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
        explained = ((rows - rows.mean(axis=0)) @ pca.components_.T).var(axis=0).sum()
        assert 1 - explained / exact(rows)[0][:k].sum() <= 1e-3


def test_steepest_ascent_where_a_sample_sees_no_maximum():
    from mpiddl.decomposition.solvers.subsample import solve

    right = np.ones((4, 2), np.float32)
    np.testing.assert_array_equal(solve(lambda z: -z, right, 6), right)


def test_a_look_at_held_out_rows_saves_a_pass():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((20_000, 100)) * (1 + np.arange(100) / 3) ** -1.0
    assert PCA(6, solver="krylov", tol=1e-3, random_state=0).fit(x).n_passes_ < 1.5
    assert PCA(6, solver="krylov", tol=1e-3, random_state=0).fit(heavy(rng, x)).n_passes_ > 2


@pytest.mark.mpi
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


@pytest.mark.mpi
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


@pytest.mark.mpi
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


@pytest.mark.parametrize("solver", ["vr", "vr-plain", "krylov"])
def test_large_weights_take_no_longer(solver):
    x = rows_of_all(2000, 30)
    settings = {"n_components": 2, "solver": solver, "tol": 1e-6, "random_state": 0}
    passes = [PCA(**settings).fit(x, sample_weight=np.full(2000, weight)).n_passes_ for weight in (1.0, 1e7)]
    assert passes[1] <= passes[0] + 1.5


@pytest.mark.mpi
def test_what_cannot_be_met_is_an_error_that_carries_the_best(comm):
    x = rows_of_all(900, 80)
    pca = PCA(4, solver="krylov", tol=1e-14, max_passes=2, random_state=0, comm=comm)
    with pytest.raises(ConvergenceError, match=r"krylov: missed about .* expected at most 1e-14") as caught:
        pca.fit(mine(x, comm))
    assert caught.value.best.components.shape == pca.components_.shape == (4, 80)


TO_ROUNDING = {
    "plain": lambda rng: rows_of_all(150, 40),
    "white": lambda rng: rng.standard_normal((150, 40)),
    "far from zero": lambda rng: rng.standard_normal((150, 40)) + 1e3,
    "heavy": lambda rng: heavy(rng, 1e3 * rows_of_all(150, 40)),
    "of rank 5": lambda rng: rng.standard_normal((150, 5)) @ rng.standard_normal((5, 40)),
    "one hot": lambda rng: np.eye(40)[rng.integers(0, 40, 150)],
    "few rows": lambda rng: rows_of_all(30, 40),
}


@pytest.mark.parametrize("rows", only(["white", "far from zero", "one hot"], TO_ROUNDING))
@pytest.mark.parametrize("solver", ["subsample", "vr", "krylov"])
def test_a_tolerance_of_zero_means_to_rounding(rows, solver):
    x = TO_ROUNDING[rows](np.random.default_rng(0))
    for kind, dtype, k, sparse in product((PCA, TruncatedSVD), ("float64", "float32"), (1, 5, -2, 0), (False, True)):
        if sparse and (solver == "vr" or (dtype == "float32" and rows == "far from zero")):  # whose centring leaves few digits
            continue
        k = k if k > 0 else min(x.shape) + k
        own = x.astype(dtype)
        values = exact(own, kind is PCA)[0]
        model = kind(k, solver=solver, tol=0, random_state=0, threads=1).fit(scipy.sparse.csr_array(own) if sparse else own)
        near = 1e-9 if dtype == "float64" else 1e-4
        case = f"{kind.__name__} {dtype} {k} of {'sparse' if sparse else 'dense'} rows"
        np.testing.assert_allclose(model.singular_values_**2, len(x) * values[:k], rtol=near, atol=near * len(x) * values[0],
                                   err_msg=case)
        assert model.n_passes_ < 100, case


@pytest.mark.parametrize("p", [3, 6])
def test_what_a_sample_may_have_got_wrong_counts_as_missed(p):
    """Exact vectors leave no residuals; their values may be too small all the same, because a sample gave the matrix."""
    true, doubt = np.linspace(2.0, 1.0, p), np.linspace(0.3, 0.1, p)
    ritz = Ritz(true - doubt, np.eye(10, p), np.zeros((10, p)), np.zeros((p, p)))
    assert missed_variance(ritz, 3) == pytest.approx(0)
    assert (missed_variance(ritz._replace(doubt=doubt), 3) >= 0.999 * doubt[:3]).all()
