"""``mpiddl pca`` and ``mpiddl svd``, and the files they take: the same results however a matrix is stored."""

from __future__ import annotations

import gzip
import json
import mmap
import re
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from harness.damaged import DAMAGES, LEGAL, changed, rows_with_gaps
from harness.matrices import exact, rows_of_all, write_hdf5

from mpiddl.cli import main
from mpiddl.data.matrix import open_matrix
from mpiddl.decomposition.plots import draw
from mpiddl.decomposition.run import decompose_file
from mpiddl.decomposition.solvers import Covariance, Ritz, Solver
from mpiddl.errors import ConvergenceError, DataError, UsageError
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi


def write_npz(path, x):
    np.savez(path, x=x)


def write_packed(path, x):
    np.savez_compressed(path, other=np.zeros(3), x=x)


def write_sparse(path, x):
    scipy.sparse.save_npz(path, scipy.sparse.csr_array(x))


FORMS = {
    "npy": ("x.npy", "", np.save),
    "by columns": ("x.npy", "", lambda path, x: np.save(path, np.asfortranarray(x))),
    "images": ("x.npy", "", lambda path, x: np.save(path, x.reshape(len(x), 4, -1))),
    "npz": ("x.npz", "", write_npz),
    "packed": ("x.npz", ":x", write_packed),
    "sparse": ("x.npz", "", write_sparse),
    "hdf5": ("x.h5", ":group/x", write_hdf5),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
def test_rows_of_any_file(form, dtype, tmp_path):
    name, member, write = FORMS[form]
    x = (100 * rows_of_all(23, 12)).astype(dtype)
    write(tmp_path / name, x)
    matrix = open_matrix(f"{tmp_path / name}{member}")
    assert (matrix.n, matrix.d, matrix.dtype) == (23, 12, np.float64 if dtype == "float64" else np.float32)
    for rows in (range(23), range(5, 9), range(23, 23)):
        found = matrix.read(rows)
        assert found.dtype == matrix.dtype
        np.testing.assert_array_equal(found.toarray() if scipy.sparse.issparse(found) else found, x[rows.start : rows.stop])


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_mnists_format(packed, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (9, 3, 4), np.uint8)
    path = tmp_path / f"train-images-idx3-ubyte{'.gz' * packed}"
    content = struct.pack(">4I", 0x803, 9, 3, 4) + images.tobytes()
    path.write_bytes(gzip.compress(content) if packed else content)
    matrix = open_matrix(str(path))
    assert (matrix.n, matrix.shape, matrix.dtype) == (9, (3, 4), np.float32)
    np.testing.assert_array_equal(matrix.read(range(2, 7)), images[2:7].reshape(5, 12))


def test_a_map_is_not_read_as_a_whole(tmp_path):
    np.save(tmp_path / "x.npy", rows_of_all(50, 8))
    rows = open_matrix(str(tmp_path / "x.npy")).read(range(10, 20))
    while isinstance(rows, np.ndarray):
        rows = rows.base
    assert isinstance(rows, mmap.mmap)


@pytest.mark.parametrize(
    ("name", "make", "error", "message"),
    [
        ("x.csv", None, UsageError, "expected a file that ends in .npy"),
        ("x.npy", None, DataError, "no such file"),
        ("x.npy", lambda path: path.write_bytes(b"nonsense"), DataError, "x.npy"),
        ("x.npy", lambda path: np.save(path, np.zeros((3, 3), complex)), DataError, "got complex128, expected real numbers"),
        ("x.npy", lambda path: np.save(path, np.zeros(3)), DataError, r"got shape \(3,\)"),
        ("x.npz", lambda path: np.savez(path, a=np.eye(2), b=np.eye(2)), UsageError, r"the arrays in this file \(a, b\)"),
        ("x.npz:c", lambda path: np.savez(path, a=np.eye(2)), DataError, "got the array name 'c'"),
        ("x.npz", lambda path: path.write_bytes(b"PK nonsense"), DataError, "damaged"),
        ("x-ubyte", lambda path: path.write_bytes(b"\0\0"), DataError, "a header of"),
    ],
)
def test_files_that_cannot_be(name, make, error, message, tmp_path):
    if make:
        make(tmp_path / name.partition(":")[0])
    with pytest.raises(error, match=message):
        open_matrix(str(tmp_path / name))


def test_a_truncated_file(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((100, 10)))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="truncated"):
        open_matrix(str(path))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", ["pca", "svd"])
def test_results_do_not_depend_on_the_ranks(size, kind, tmp_path):
    x = rows_of_all(200, 30)
    np.save(tmp_path / "x.npy", x)

    def program(comm):
        return decompose_file(str(tmp_path / "x.npy"), tmp_path / "out", kind, comm=comm, n_components=3, tol=1e-13)

    summary = virtual.run(size, program)[0]
    values, vectors, mean = exact(x, kind == "pca")
    np.testing.assert_allclose(np.abs(np.sum(np.load(tmp_path / "out/components.npy") * vectors[:3], axis=1)), 1, rtol=1e-9)
    np.testing.assert_allclose(np.abs(np.load(tmp_path / "out/scores.npy")), np.abs((x - mean) @ vectors[:3].T), atol=1e-8)
    np.testing.assert_allclose(summary["singular_values"], np.sqrt(values[:3] * 200), rtol=1e-9)
    assert (tmp_path / "out/mean.npy").exists() == (kind == "pca")
    assert json.loads((tmp_path / "out/summary.json").read_text()) == summary
    assert summary["converged"] and summary["rows"] == 200


@pytest.mark.more
def test_the_commands(mpirun, tmp_path):
    x = rows_of_all(300, 40, dtype="float32")
    np.save(tmp_path / "x.npy", x)
    done = mpirun(3, "mpiddl", "pca", tmp_path / "x.npy", "-k", "0.8", "-o", tmp_path / "out", "--solver", "krylov",
                  "--whiten", "--tol", "1e-5")
    assert done.returncode == 0, done.stderr
    assert "300 x 40 float32 on 3 ranks, krylov" in done.stdout
    assert "pass " in done.stderr and "error" in done.stderr
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert sum(summary["explained_variance_ratio"]) > 0.8
    assert summary["history"][-1]["error"] <= 1e-5
    np.testing.assert_allclose(np.load(tmp_path / "out/scores.npy").std(axis=0, ddof=1), 1, rtol=1e-3)

    again = mpirun(2, "mpiddl", "svd", tmp_path / "x.npy", "-k", "2", "-o", tmp_path / "out", "--quiet")
    assert again.returncode == 2
    assert "name an empty folder, or use `--overwrite`" in again.stderr
    again = mpirun(2, "mpiddl", "svd", tmp_path / "x.npy", "-k", "2", "-o", tmp_path / "out", "--quiet", "--overwrite")
    assert again.returncode == 0, again.stderr
    assert again.stdout == again.stderr == ""
    assert np.load(tmp_path / "out/components.npy").shape == (2, 40)


def test_what_did_not_converge_is_written_and_told(tmp_path):
    np.save(tmp_path / "x.npy", rows_of_all(500, 60))

    def program(comm):
        settings = {"n_components": 3, "tol": 1e-14, "solver": "krylov", "max_passes": 2, "random_state": 0}
        with pytest.raises(ConvergenceError, match="krylov: missed about"):
            decompose_file(str(tmp_path / "x.npy"), tmp_path / "out", comm=comm, **settings)

    virtual.run(2, program)
    assert json.loads((tmp_path / "out/summary.json").read_text())["converged"] is False
    assert np.load(tmp_path / "out/scores.npy").shape == (500, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-k", "many"), "components: got 'many'"),
        (("-k", "99"), "components: got 99, expected a whole number from 1 to"),
        (("-k", "3", "--solver", "magic"), "solver: got 'magic'"),
        (("-k", "3", "--no-center", "--whiten"), "whiten: got --no-center"),
        (("-k", "3", "--tol", "7"), "tol: got 7.0"),
        (("-k", "3", "--seed", "-1"), "--seed"),
        (("-k", "3", "--memory", "much"), "memory: got 'much'"),
        ((), "Missing option"),
    ],
)
def test_commands_that_make_no_sense(arguments, message, tmp_path, capsys):
    np.save(tmp_path / "x.npy", rows_of_all(50, 8))
    with pytest.raises(SystemExit, match="2"):
        main(["pca", str(tmp_path / "x.npy"), "-o", str(tmp_path / "out"), *arguments])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out/components.npy").exists()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["pca", "svd"])
def test_a_file_without_rows_is_named(kind, size, tmp_path):
    np.save(tmp_path / "x.npy", np.empty((0, 8)))

    def program(comm):
        with pytest.raises(DataError, match=r"x\.npy: got 0 rows, expected one or more"):
            decompose_file(str(tmp_path / "x.npy"), tmp_path / "out", kind, comm=comm, n_components=2)

    virtual.run(size, program)


@pytest.mark.plots
@pytest.mark.parametrize("largest", [1.0, 0.00125, 987_654.0, 1e12])
def test_labels_lie_inside_the_pictures(largest, tmp_path, monkeypatch):
    figure, agg = (pytest.importorskip(f"matplotlib.{name}") for name in ("figure", "backends.backend_agg"))
    drawn = []

    def savefig(self, path, dpi):
        drawn.append(path.name)
        (axes,) = self.axes
        box = axes.get_tightbbox(agg.FigureCanvasAgg(self).get_renderer())
        assert box.min.min() >= 0 and (box.max <= self.bbox.max).all()

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    np.save(tmp_path / "scores.npy", np.random.default_rng(0).uniform(-largest, largest, (100, 2)))
    assert draw(tmp_path, {"explained_variance_ratio": [0.00125, 0.000875]})
    assert drawn == ["scree.png", "scores.png"]


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_not_finite_is_named_by_its_place_in_the_file(size, tmp_path):
    x = rows_of_all(50, 8)
    x[:, 2], x[41, 5] = np.nan, np.inf
    np.save(tmp_path / "x.npy", x)

    def program(comm):
        with pytest.raises(DataError, match="infinity: row 41, column 5 of the file"):
            decompose_file(str(tmp_path / "x.npy"), tmp_path / "out", comm=comm, n_components=2, mask="auto")

    virtual.run(size, program)


def test_results_are_replaced_only_by_results(tmp_path):
    np.save(tmp_path / "x.npy", rows_of_all(50, 8))
    decompose_file(str(tmp_path / "x.npy"), tmp_path / "out", n_components=3)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    bad = rows_of_all(50, 8)
    bad[7, 7] = np.nan
    np.save(tmp_path / "bad.npy", bad)
    with pytest.raises(DataError, match="NaN"):
        decompose_file(str(tmp_path / "bad.npy"), tmp_path / "out", n_components=2, overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    scores = np.load(tmp_path / "out/scores.npy")
    decompose_file(str(tmp_path / "out/scores.npy"), tmp_path / "out", n_components=2, overwrite=True)
    assert np.load(tmp_path / "out/scores.npy").shape == (50, 2)
    np.testing.assert_allclose(np.abs(np.load(tmp_path / "out/components.npy")), np.eye(3)[:2], atol=1e-6)
    assert scores.shape == (50, 3)


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
def test_every_matrix_that_scipy_saves(form, tmp_path):
    x = rows_of_all(20, 6)
    scipy.sparse.save_npz(tmp_path / "x.npz", scipy.sparse.csr_array(x).asformat(form))
    np.testing.assert_array_equal(open_matrix(str(tmp_path / "x.npz")).read(range(3, 9)).toarray(), x[3:9])


def write_changed(path, name):
    x = scipy.sparse.csr_array(rows_with_gaps())
    data, indices, indptr = changed(x, name)
    np.savez(path, data=data, indices=indices, indptr=indptr, shape=x.shape, format=b"csr")


@pytest.mark.parametrize("size", [1, 3])
def test_a_damaged_sparse_matrix_is_an_error_on_every_rank(size, tmp_path):
    path = tmp_path / "x.npz"

    def program(comm, message):
        with pytest.raises(DataError, match=message):
            decompose_file(str(path), tmp_path / "out", comm=comm, n_components=2)

    by_scipy = "the file is damaged, or contains no sparse matrix"  # its constructors see some of it
    for damage, (_, _, message) in DAMAGES.items():
        write_changed(path, damage)
        virtual.run(size, partial(program, message=f"x.npz: ({message}|{by_scipy})"))
        assert not (tmp_path / "out/summary.json").exists(), damage


@pytest.mark.parametrize("size", [1, 3])
def test_a_sparse_matrix_with_unusual_indices(size, tmp_path):
    path = tmp_path / "x.npz"
    values = exact(rows_with_gaps())[0]

    def program(comm):
        return decompose_file(str(path), tmp_path / "out", comm=comm, n_components=3, overwrite=True, tol=1e-12)

    for change in LEGAL:
        write_changed(path, change)
        found = virtual.run(size, program)[0]["singular_values"]
        np.testing.assert_allclose(found, np.sqrt(values[:3] * 60), rtol=1e-9, err_msg=change)


@pytest.mark.parametrize("entry", ["data", "indices", "indptr", "shape", "format"])
def test_any_damage_to_an_array_of_a_sparse_matrix(entry, tmp_path):
    x = scipy.sparse.csr_array(rows_with_gaps())
    for wrong in (np.array("text"), np.zeros(0), np.zeros((2, 2)), np.array(3), np.array(-1), np.array([1, 2, 3]),
                  np.array([2**62, 2**62]), np.array([-60, 20]), np.array([60.0, 20.0]), np.array([None])):
        arrays = {"data": x.data, "indices": x.indices, "indptr": x.indptr, "shape": x.shape, "format": b"csr", entry: wrong}
        np.savez(tmp_path / "x.npz", **arrays)
        with pytest.raises(DataError, match=r"x\.npz"):
            pytest.fail(f"{wrong!r}: {open_matrix(str(tmp_path / 'x.npz'))}")


def test_a_solver_of_ones_own(tmp_path, monkeypatch):
    """From its module's name, as the example has it; rows in a file that does not fit into memory, and a path that is one."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    x = rows_of_all(200, 12)
    np.save(tmp_path / "x.npy", x)
    made = decompose_file(tmp_path / "x.npy", tmp_path / "out", "pca", n_components=2, solver="own_solver:OrthogonalIteration",
                          memory=1000)  # fmt: skip
    assert made["solver"] == "own_solver:OrthogonalIteration" and made["passes"] > 3
    assert made["explained_variance"] == pytest.approx(np.linalg.eigvalsh(np.cov(x.T))[:-3:-1], rel=1e-6)


class Broken(Solver):
    """Finds nothing that is a number."""

    def solve(self, task, done):
        covariance = Covariance(task.comm, task.rows, np.zeros(task.rows.d))
        vectors = np.eye(task.rows.d)[:, : task.k]
        image = covariance.apply(vectors)
        return covariance, Ritz(np.ones(task.k), vectors * np.nan, image, np.eye(task.k))


class Lazy(Solver):
    """Has no method at all."""


@pytest.mark.parametrize(("solver", "said"), [
    (f"{__name__}:Broken", "returned components that are not finite"),
    (f"{__name__}:Lazy", "could not be created (TypeError: Can't instantiate abstract class Lazy"),
    (None, "solver: got None, expected one of auto, gram"),
    (3, "solver: got 3, expected one of auto, gram"),
    ("own_solver:np", "solver: got module, expected a class derived from mpiddl.decomposition.solvers.base.Solver"),
    ("own_solver:main", "solver: got NoneType, expected a class derived from"),
    ("krylov:depth=3", "solver krylov: got 'depth=3', expected no parameters"),
    ("krilov", "expected one of auto, gram, subsample, vr, vr-plain, krylov, or MODULE:CLASS; did you mean 'krylov'?"),
])  # fmt: skip
def test_what_is_no_solver(tmp_path, monkeypatch, solver, said):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    np.save(tmp_path / "x.npy", rows_of_all(20, 4))
    with pytest.raises(UsageError, match=re.escape(said)):
        decompose_file(str(tmp_path / "x.npy"), tmp_path / "out", "pca", n_components=2, solver=solver)
