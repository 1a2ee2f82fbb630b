"""An unchanged program's estimators of scikit-learn: what is replaced, by what, and that everything is undone."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import scipy.sparse
import sklearn.decomposition
import sklearn.neural_network
from harness.tiers import more
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from mpiddl.programs import sklearn_estimators

pytestmark = pytest.mark.no_mpi

rng = np.random.default_rng(0)
X = rng.standard_normal((300, 12)) * np.linspace(4, 1, 12) + np.arange(12)
Y = np.digitize(X[:, 0], [-3, 3])
WIDE = rng.standard_normal((90, 600)) * np.linspace(3, 0.1, 600)
SPARSE = scipy.sparse.csr_array(np.where(abs(X) > 2, X, 0))


@pytest.fixture
def installed(comm):
    found = sklearn_estimators.install(comm)
    yield found
    found.remove()


def quietly(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def divided(comm):
    return f"rows divided over {comm.size} rank{'s' * (comm.size > 1)}"


PCA, SVD = sklearn.decomposition.PCA, sklearn.decomposition.TruncatedSVD
MLP, REGRESSOR = sklearn.neural_network.MLPClassifier, sklearn.neural_network.MLPRegressor

CASES = [
    (PCA(3), X),
    (PCA(), X),
    (PCA(0.9, whiten=True), X),
    (PCA(3), X.astype(np.float32)),
    (PCA(3, random_state=0, svd_solver="arpack"), WIDE),
    (PCA(3, random_state=0), SPARSE),
    (SVD(3, random_state=0, algorithm="arpack"), X),
    (SVD(3, random_state=0, n_iter=20), SPARSE),
    (MLP((9,), max_iter=4, random_state=0), X),
    (REGRESSOR(hidden_layer_sizes=(9,), max_iter=4, random_state=0, early_stopping=True), X),
    more(MLP((9,), max_iter=4, random_state=0, solver="lbfgs"), SPARSE),
]


@pytest.mark.mpi
@pytest.mark.parametrize(("model", "x"), CASES, ids=lambda value: str(value).replace("\n", "") if hasattr(value, "fit") else "")
def test_attributes_are_those_of_scikit_learn(comm, model, x):
    wanted = quietly(lambda: clone(model).fit(x, Y))
    installed = sklearn_estimators.install(comm)
    try:
        found = quietly(lambda: clone(model).fit(x, Y))
        assert installed.rows() == [(type(model).__name__, 1, divided(comm))]
    finally:
        installed.remove()
    near = 1e-3 if x.dtype == np.float32 else 1e-6
    public = {name for name in vars(wanted) if not name.startswith("_")}
    assert public == {name for name in vars(found) if not name.startswith("_")}
    for name in sorted(name for name in public if name.endswith("_")):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        pairs = zip(ours, theirs, strict=True) if isinstance(theirs, list) else [(ours, theirs)]
        for one, other in pairs:
            assert (np.shape(one), np.asarray(one).dtype) == (np.shape(other), np.asarray(other).dtype), name
            if isinstance(other, str) or other is None:
                assert one == other
            else:
                np.testing.assert_allclose(one, other, rtol=near, atol=near, err_msg=name)
    assert pickle.loads(pickle.dumps(found)).__class__ is type(model)


@pytest.mark.mpi
def test_transformed_rows_are_whole(comm, installed):
    scores = PCA(3).fit_transform(X)
    installed.remove()
    np.testing.assert_allclose(scores, PCA(3).fit_transform(X), atol=1e-8)


@pytest.mark.mpi
def test_in_a_pipeline_that_is_searched(comm, installed):
    pipe = make_pipeline(StandardScaler(), PCA(4), MLP((8,), max_iter=3, random_state=0))
    search = quietly(lambda: GridSearchCV(pipe, {"pca__n_components": [2, 5]}, cv=2).fit(X, Y))
    assert installed.rows() == [("PCA", 5, divided(comm)), ("MLPClassifier", 5, divided(comm))]
    scores = comm.allgather(search.cv_results_["mean_test_score"].tolist())
    assert all(each == scores[0] for each in scores)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (PCA("mle", svd_solver="full"), X, "n_components='mle'"),
        (PCA(3, svd_solver="full"), X, "svd_solver='full'"),
        (PCA(3), X[:40], "svd_solver='full'"),
        (SVD(12), X, "n_components=12 for 300 rows of 12 columns"),
    ],
)
def test_what_is_not_served_is_scikit_learns_own(installed, model, x, reason):
    model.fit(x)
    [(_, fits, how)] = installed.rows()
    assert fits == 1 and how.startswith(f"scikit-learn's own: {reason}")


@pytest.mark.mpi(min_size=2)
def test_data_and_parameters_that_differ_between_ranks(comm, installed):
    own = X + comm.rank
    quietly(lambda: MLP((5,), max_iter=2, random_state=0).fit(own, Y))
    pca = PCA(2).fit(own)
    np.testing.assert_allclose(pca.mean_, own.mean(axis=0))
    PCA(2, whiten=comm.rank == 1).fit(X)
    assert [how.partition(" (")[0] for _, _, how in installed.rows()] == [
        "scikit-learn's own: data that differ between ranks", "scikit-learn's own: data that differ between ranks",
        "scikit-learn's own: parameters that differ between ranks"]  # fmt: skip


@pytest.mark.mpi
def test_errors_are_those_of_scikit_learn(installed):
    broken = np.where(np.arange(300)[:, None] == 3, np.nan, X)
    for model in (PCA(2), MLP()):
        with pytest.raises(ValueError, match="contains NaN"):
            model.fit(broken, Y)
    with pytest.raises(ValueError, match="n_components"):
        PCA(30).fit(X)
    with pytest.raises(ValueError, match="'alpha' parameter"):
        MLP(alpha=-1).fit(X, Y)


def test_threads_and_classes_with_code_of_their_own(installed):
    class Own(PCA):
        def transform(self, x):
            return x

    Own(2).fit(X)
    thread = threading.Thread(target=lambda: PCA(2).fit(X))
    thread.start()
    thread.join()
    assert [how for _, _, how in installed.rows()] == [
        "scikit-learn's own: Own has its own transform",
        "scikit-learn's own: a fit in a thread, which may come in another order on other ranks",
    ]


def test_everything_is_undone(comm):
    kinds = [PCA, SVD, MLP, REGRESSOR]
    before, path = [dict(vars(kind)) for kind in kinds], list(sys.meta_path)
    installed = sklearn_estimators.install(comm)
    assert all(dict(vars(kind)) != there for kind, there in zip(kinds, before, strict=True))
    installed.remove()
    assert [dict(vars(kind)) for kind in kinds] == before and sys.meta_path == path


def test_an_import_that_comes_later_is_replaced_too():
    program = """
import sys
from mpiddl.programs import sklearn_estimators
from mpiddl.transport import virtual
def run(comm):
    installed = sklearn_estimators.install(comm)
    assert "sklearn" not in sys.modules
    import numpy as np
    import sklearn.decomposition as d
    d.PCA(2).fit(np.random.default_rng(0).standard_normal((50, 4)))
    print(*installed.rows())
    installed.remove()
    assert d.PCA.fit.__module__.startswith("sklearn")
virtual.run(1, run)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "how='rows divided over 1 rank'" in done.stdout, done.stderr


APART = """
import numpy as np
from mpi4py import MPI
from sklearn.decomposition import PCA
for _ in range(2 + (MPI.COMM_WORLD.rank == RANK)):
    PCA(2).fit(np.eye(9))
"""


@pytest.mark.more
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_make_different_numbers_of_fits_are_told(tmp_path, mpirun, rank):
    program = tmp_path / "program.py"
    program.write_text(APART.replace("RANK", str(rank)))
    done = mpirun(2, "mpiddl", "run", program)
    assert done.returncode != 0
    assert f"rank {1 - rank} at the end of the program" in done.stderr and f"rank {rank} at a fit of PCA" in done.stderr
