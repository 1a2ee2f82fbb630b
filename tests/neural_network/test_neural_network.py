"""MLPClassifier and MLPRegressor: scikit-learn's own on all rows, on any number of ranks and however rows are passed."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import scipy.sparse
import sklearn.neural_network as theirs
from harness.matrices import DEALS
from harness.tiers import more
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import has_fit_parameter

from mpiddl.errors import DataError, MismatchError, UsageError
from mpiddl.neural_network import MLPClassifier, MLPRegressor

pytestmark = pytest.mark.no_mpi

N = 150
NEAR = {"float64": 1e-9, "float32": 2e-4}
OURS = {"rows", "comm", "threads"}
LAYOUT = {"_coef_indptr", "_intercept_indptr"}  # of scikit-learn's L-BFGS, for its own use during a fit
WEIGHTED = has_fit_parameter(theirs.MLPClassifier(), "sample_weight")

rng = np.random.default_rng(0)
X = rng.standard_normal((N, 7))
TARGETS = {
    "binary": (X[:, 0] > 0) * 5,
    "classes": np.digitize(X[:, 1], [-0.5, 0.5]) * 10,
    "labels": (X[:, :3] > 0).astype(int),
    "number": X[:, 0] * X[:, 1],
    "numbers": np.c_[X[:, 0] * X[:, 1], X[:, 2]],
}
WEIGHTS = rng.random(N) + 0.1


def kinds(target):
    """Ours and scikit-learn's estimator."""
    name = "MLPRegressor" if target.startswith("number") else "MLPClassifier"
    return {"MLPRegressor": MLPRegressor, "MLPClassifier": MLPClassifier}[name], getattr(theirs, name)


def both(comm, target, x=X, weights=None, rows="all", deal="even", **settings):
    """Ours on all ranks, and scikit-learn's on this rank alone."""
    settings = {"hidden_layer_sizes": (9, 5), "max_iter": 6, "random_state": 3, "batch_size": 40, **settings}
    own, other = kinds(target)
    more = {} if weights is None else {"sample_weight": weights}
    y = TARGETS[target]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = other(**settings).fit(x, y, **more)
        if rows == "own":
            keep = np.flatnonzero(DEALS[deal](N, comm.size) == comm.rank)
            order = np.concatenate(comm.allgather(keep))
            reference = other(**settings).fit(x[order], y[order], **{name: value[order] for name, value in more.items()})
            x, y, more = x[keep], y[keep], {name: value[keep] for name, value in more.items()}
        model = own(comm=comm, rows=rows, threads=1, **settings).fit(x, y, **more)
    return model, reference


def assert_same(model, reference, near=1e-9):
    assert set(vars(model)) - OURS == set(vars(reference)) - LAYOUT
    for ours, wanted in zip(model.coefs_ + model.intercepts_, reference.coefs_ + reference.intercepts_, strict=True):
        assert ours.dtype == wanted.dtype and ours.shape == wanted.shape
        np.testing.assert_allclose(ours, wanted, rtol=near, atol=near)
    for name in ("n_iter_", "n_layers_", "n_outputs_", "out_activation_", "t_", "n_features_in_"):
        assert getattr(model, name) == getattr(reference, name)
    for name in ("loss_", "loss_curve_", "best_loss_", "validation_scores_", "best_validation_score_"):
        wanted = getattr(reference, name, None)
        assert (wanted is None) == (getattr(model, name, None) is None)
        if wanted is not None:
            np.testing.assert_allclose(getattr(model, name), wanted, rtol=100 * near)
    if hasattr(model, "classes_"):
        assert model.classes_.tolist() == reference.classes_.tolist()


@pytest.mark.mpi
@pytest.mark.parametrize("solver", ["adam", "sgd", "lbfgs"])
@pytest.mark.parametrize("activation", ["identity", "logistic", "tanh", "relu"])
@pytest.mark.parametrize("target", TARGETS)
def test_weights_are_those_of_scikit_learn(comm, target, activation, solver):
    model, reference = both(comm, target, activation=activation, solver=solver)
    assert_same(model, reference)
    assert len(set(comm.allgather(b"".join(coef.tobytes() for coef in model.coefs_)))) == 1
    if target.startswith("number"):
        np.testing.assert_allclose(model.predict(X), reference.predict(X), atol=1e-9)
    else:
        np.testing.assert_allclose(model.predict_proba(X), reference.predict_proba(X), atol=1e-9)
        np.testing.assert_array_equal(model.predict(X), reference.predict(X))


@pytest.mark.mpi
@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("binary", {}),
        ("classes", {"solver": "lbfgs"}),
        ("labels", {"early_stopping": True}),
        ("number", {"early_stopping": True, "solver": "sgd"}),
    ],
)
def test_each_rank_passes_its_own_rows(comm, target, settings, deal):
    weights = WEIGHTS if WEIGHTED else None
    assert_same(*both(comm, target, rows="own", deal=deal, weights=weights, **settings))


SETTINGS = [
    {"early_stopping": True, "max_iter": 40, "tol": 0.01},
    {"solver": "sgd", "learning_rate": "adaptive", "learning_rate_init": 0.3, "max_iter": 60, "n_iter_no_change": 2},
    {"solver": "sgd", "learning_rate": "invscaling", "learning_rate_init": 0.3, "nesterovs_momentum": False},
    {"solver": "sgd", "momentum": 0.0},
    {"shuffle": False, "alpha": 1.0},
    {"hidden_layer_sizes": ()},
    {"hidden_layer_sizes": 3, "batch_size": 1000},
    {"batch_size": 1, "max_iter": 1},
]


@pytest.mark.mpi
@pytest.mark.parametrize("sparse", [False, more(True)], ids=["dense", "sparse"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("target", ["binary", "classes", "number"])
def test_settings(comm, target, settings, sparse):
    x = scipy.sparse.csr_array(np.where(abs(X) < 1, 0, X)) if sparse else X
    assert_same(*both(comm, target, x=x, weights=WEIGHTS if WEIGHTED else None, **settings))


@pytest.mark.mpi
@pytest.mark.parametrize("target", ["classes", "number"])
def test_float32_stays_float32(comm, target):
    model, reference = both(comm, target, x=X.astype(np.float32))
    assert model.coefs_[0].dtype == np.float32
    for ours, wanted in zip(model.coefs_, reference.coefs_, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-5)


@pytest.mark.skipif(not hasattr(theirs.MLPRegressor(), "loss") or "loss" not in theirs.MLPRegressor().get_params(),
                    reason="this version of scikit-learn has no Poisson loss")
def test_poisson(comm):
    TARGETS["number counts"] = np.random.default_rng(1).poisson(2.0, N)
    assert_same(*both(comm, "number counts", loss="poisson"))


@pytest.mark.mpi
def test_partial_fit_goes_on_after_pickling(comm):
    model = MLPClassifier((5,), random_state=0, comm=comm, rows="all")
    reference = theirs.MLPClassifier((5,), random_state=0)
    y = TARGETS["classes"]
    for begin in range(0, N, 50):
        for each in (model, reference):
            each.partial_fit(X[begin : begin + 50], y[begin : begin + 50], classes=[0, 10, 20])
        model = pickle.loads(pickle.dumps(model)).set_params(comm=comm)
    assert_same(model, reference)
    plain = clone(model)
    assert plain.comm is comm and not hasattr(plain, "coefs_")


def test_warm_start_and_threads():
    y = TARGETS["classes"]
    settings = {"random_state": 0, "max_iter": 3, "warm_start": True, "hidden_layer_sizes": (400,)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = np.random.default_rng(2).standard_normal((N, 300))
        model = MLPClassifier(threads=3, **settings).fit(wide, y).fit(wide, y)
        reference = theirs.MLPClassifier(**settings).fit(wide, y).fit(wide, y)
        assert_same(model, reference)
        assert_same(model.set_params(hidden_layer_sizes=(5,)).fit(wide, y), reference.fit(wide, y))  # they keep their layers
        with pytest.raises(ValueError, match=r"warm_start: got layers of \[300, 5, 5, 3\] units after a fit"):
            model.set_params(hidden_layer_sizes=(5, 5)).fit(wide, y)


@pytest.mark.mpi
def test_bad_input_is_one_error_on_all_ranks(comm):
    y = TARGETS["classes"]
    with pytest.raises(UsageError, match="rows: got 'each', expected 'own'"):
        MLPClassifier(comm=comm, rows="each").fit(X, y)
    with pytest.raises(ValueError, match="The validation set is too small"):
        MLPClassifier(comm=comm, rows="all", early_stopping=True, validation_fraction=0.01).fit(X[:40], TARGETS["labels"][:40])
    with pytest.raises(ValueError, match="does not support early_stopping"):
        MLPClassifier(comm=comm, rows="all", early_stopping=True).partial_fit(X, y, classes=[0, 10, 20])
    broken = np.where(np.arange(N)[:, None] == 3, np.nan, X)
    with pytest.raises(ValueError, match="Input X contains NaN"):
        MLPClassifier(comm=comm, rows="all").fit(broken, y)
    if comm.size == 1:
        return
    last = comm.rank == comm.size - 1
    with pytest.raises(DataError, match=f"Input X contains NaN.*rank {comm.size - 1} of {comm.size}"):
        MLPClassifier(comm=comm).fit(broken if last else X, y)
    with pytest.raises(MismatchError, match="rows: got other data on rank"):
        MLPClassifier(comm=comm, rows="all").fit(X[::-1] if last else X, y)
    with pytest.raises(MismatchError, match="rows: got data that scikit-learn refuses on rank"):
        MLPClassifier(comm=comm, rows="all").fit(broken if last else X, y)
    with pytest.raises(MismatchError, match="alpha: rank 0 got"):
        MLPClassifier(comm=comm, alpha=1.0 if last else 0.5).fit(X, y)
    with pytest.raises(DataError, match=f"'alpha' parameter.*rank {comm.size - 1} of {comm.size}"):
        MLPClassifier(comm=comm, alpha=-1.0 if last else 0.5).fit(X, y)
    with pytest.raises(UsageError, match="X: got 0 rows on all ranks"):
        MLPClassifier(comm=comm).fit(X[:0], y[:0])


@pytest.mark.mpi
def test_generators_in_different_states(comm):
    """Rank 0's counts, and generators in equal states stay equal."""
    states = [np.random.RandomState(5 if comm.rank == 0 else 6 + comm.rank), np.random.RandomState(7)]
    for state, seed in zip(states, (5, 7), strict=True):
        model = MLPRegressor(hidden_layer_sizes=(4,), max_iter=1, random_state=state, comm=comm, rows="all")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(X, TARGETS["number"])
            reference = theirs.MLPRegressor(hidden_layer_sizes=(4,), max_iter=1, random_state=seed).fit(X, TARGETS["number"])
        np.testing.assert_allclose(model.coefs_[0], reference.coefs_[0], atol=1e-9)
    assert len(set(comm.allgather(states[1].randint(1 << 30)))) == 1


@pytest.mark.more
@parametrize_with_checks([MLPClassifier(), MLPRegressor()])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("solver", ["adam", "sgd", "lbfgs"])
@pytest.mark.parametrize("kind", [MLPClassifier, MLPRegressor])
def test_a_fit_is_not_scikit_learns_own(kind, solver, monkeypatch):
    monkeypatch.delattr(theirs._multilayer_perceptron.BaseMultilayerPerceptron, "_fit")
    kind(hidden_layer_sizes=(3,), solver=solver, max_iter=2000, tol=0.1).fit(X, TARGETS["binary"] > 0)


def test_a_class_with_its_own_backprop_is_trained_by_scikit_learn():
    class Own(MLPClassifier):
        def _backprop(self, *args):
            self.called = True
            return super()._backprop(*args)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert Own((3,), max_iter=1).fit(X, TARGETS["classes"]).called


@pytest.mark.mpi
@pytest.mark.parametrize("rows", ["all", "own"])
def test_more_ranks_than_rows_in_a_batch(comm, rows):
    """Of two rows in all, the first ranks hold one or none."""
    x, y = X[:2], TARGETS["number"][:2]
    own = slice(None) if rows == "all" or comm.rank == comm.size - 1 else slice(0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"hidden_layer_sizes": (3,), "max_iter": 3, "random_state": 0, "batch_size": 1}
        model = MLPRegressor(comm=comm, rows=rows, **settings).fit(x[own], y[own])
        assert_same(model, theirs.MLPRegressor(**settings).fit(x, y))


def test_a_filter_for_scikit_learns_warnings_holds(comm):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=ConvergenceWarning, module="sklearn")
        MLPClassifier(max_iter=1, comm=comm).fit(X, TARGETS["classes"])
