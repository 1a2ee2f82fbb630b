"""Rows that stay in their file, columns that are missing or weigh more: the same components as of arrays in memory."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.io
from harness.matrices import exact, rows_of_all, write_hdf5

from mpiddl.data.matrix import open_matrix
from mpiddl.decomposition import PCA
from mpiddl.decomposition.rows import files as file_rows
from mpiddl.decomposition.rows.dense import DenseRows
from mpiddl.decomposition.rows.files import FileRows
from mpiddl.decomposition.run import decompose_file
from mpiddl.errors import DataError, UsageError
from mpiddl.kernels.rows.normal_product import BLOCK
from mpiddl.machine.footprint import Peak, footprint
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

D = 30
SOLVERS = ["gram", "subsample", "vr", "krylov"]


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 40 rows, samples of 100."""
    monkeypatch.setattr(file_rows, "CHUNK_BYTES", 40 * D * 8)
    monkeypatch.setattr(file_rows, "SAMPLE_BYTES", 100 * D * 8)


def mapped(path, x):
    np.save(path, x)
    return np.load(path, mmap_mode="r")


@pytest.fixture(params=["mapped", "read"])
def pair(request, small_chunks, tmp_path, weighted):
    x = rows_of_all(333, D)
    weights = np.random.default_rng(1).random(333) + 0.5 if weighted else None
    view = mapped(tmp_path / "x.npy", x) if request.param == "mapped" else x
    return FileRows(lambda begin, end: view[begin:end], 333, D, x.dtype, weights), DenseRows(x, weights)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_pass_to_and_fro(pair):
    rows, array = pair
    w, origin = np.random.default_rng(0).standard_normal((D, 3)), np.arange(D) / 9
    wanted = array.sums(w, origin, moments=True)
    for _ in range(3):
        for found, exactly in zip(rows.sums(w, origin, moments=True), wanted, strict=True):
            np.testing.assert_allclose(found, exactly, rtol=1e-12, atol=1e-9)
    assert rows.total == array.total
    np.testing.assert_allclose(rows.weighted_sum(), array.weighted_sum())


@pytest.mark.parametrize("weighted", [False, True])
def test_some_rows_of_a_file(pair):
    rows, array = pair
    some = np.array([0, 7, 8, 100, 332])
    np.testing.assert_array_equal(rows.take(some).x, array.x[some])
    np.testing.assert_array_equal(rows.take(some).weights, array.take(some).weights)
    for most in (7, 1000):
        blocks = list(rows.blocks(most))
        assert max(len(x) for x, _ in blocks) <= max(most, 40)
        np.testing.assert_array_equal(np.concatenate([x for x, _ in blocks]), array.x)
        np.testing.assert_array_equal(np.concatenate([weights for _, weights in blocks]), array.weights)


@pytest.mark.parametrize("weighted", [False, True])
def test_mini_batches_of_a_file(pair):
    rows, array = pair
    last = 333 // BLOCK * BLOCK  # of which only some are there
    groups = [np.array([[0, 48], [last, 24]]), np.array([[last, last]])]
    for starts, (x, weights, places) in zip(groups, rows.gathered(groups), strict=True):
        for start, place in zip(starts.ravel(), places.ravel(), strict=True):
            count = min(BLOCK, 333 - start)
            np.testing.assert_array_equal(x[place : place + count], array.x[start : start + count])
            own = weights[place : place + BLOCK] if weights.size else np.ones(min(BLOCK, len(x) - place))
            np.testing.assert_array_equal(own[:count], array.weights[start : start + count] if array.weights.size else 1)
            assert not own[count:].any()  # rows that are not there


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("solver", SOLVERS)
def test_components_of_mapped_rows(comm, solver, small_chunks, monkeypatch, tmp_path):
    monkeypatch.setattr("mpiddl.decomposition.estimator.CHUNK_BYTES", 40 * D * 8)
    x = rows_of_all(700, D)
    view = mapped(tmp_path / f"{comm.rank}.npy", x)[comm.rank :: comm.size]
    own = mapped(tmp_path / f"own{comm.rank}.npy", view)
    pca = PCA(4, solver=solver, tol=1e-13, random_state=0, comm=comm).fit(own)
    np.testing.assert_allclose(pca.components_, exact(x)[1][:4], atol=1e-6)
    assert len(set(comm.allgather(pca.components_.tobytes()))) == 1
    partial = PCA(4, solver=solver, tol=1e-13, random_state=0, comm=comm).partial_fit(own)
    np.testing.assert_allclose(partial.explained_variance_, pca.explained_variance_, rtol=1e-10)


def test_rows_in_a_file_that_make_no_sense(small_chunks, monkeypatch, tmp_path):
    monkeypatch.setattr("mpiddl.decomposition.estimator.CHUNK_BYTES", 40 * D * 8)
    x = rows_of_all(300, D)
    with pytest.raises(UsageError, match="got vr-plain for rows in a file"):
        PCA(2, solver="vr-plain").fit(mapped(tmp_path / "x.npy", x))
    x[211, 5] = np.inf
    with pytest.raises(ValueError, match="Input X contains infinity: row 211, column 5"):
        PCA(2).fit(mapped(tmp_path / "y.npy", x))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("form", ["npy", "int", "by columns", "h5", "nc"])
def test_files_larger_than_memory(form, size, small_chunks, monkeypatch, tmp_path):
    monkeypatch.setattr("mpiddl.decomposition.run.CHUNK_BYTES", 40 * D * 8)
    x = np.round(1000 * rows_of_all(250, D))
    name = {"h5": "x.h5:group/x", "nc": "x.nc:x"}.get(form, "x.npy")
    if form == "h5":
        write_hdf5(tmp_path / "x.h5", x)
    elif form == "nc":
        write_netcdf(tmp_path / "x.nc", x)
    else:
        np.save(tmp_path / "x.npy", {"npy": x, "int": x.astype(np.int32), "by columns": np.asfortranarray(x)}[form])

    def program(comm):
        settings = {"n_components": 3, "tol": 1e-12, "memory": 1, "random_state": 0, "solver": "krylov"}
        return decompose_file(str(tmp_path / name), tmp_path / "out", comm=comm, **settings)

    summary = virtual.run(size, program)[0]
    _, vectors, mean = exact(x)
    np.testing.assert_allclose(np.load(tmp_path / "out/components.npy"), vectors[:3], atol=1e-6)
    np.testing.assert_allclose(np.load(tmp_path / "out/scores.npy"), (x - mean) @ vectors[:3].T, atol=1e-3)
    assert 1e6 < summary["memory_of_a_rank"] < 1e10


def write_netcdf(path, x, **attributes):
    with scipy.io.netcdf_file(path, "w") as file:
        file.createDimension("time", None)  # records, whose numbers lie apart
        for axis, size in enumerate(x.shape[1:]):
            file.createDimension(f"axis{axis}", size)
        names = ("time", *(f"axis{axis}" for axis in range(x.ndim - 1)))
        for name in ("other", "x"):
            variable = file.createVariable(name, x.dtype, names)
            variable[:] = x
        for name, value in attributes.items():
            setattr(variable, name, value)


def field(n=80):
    """A field of 4 x 6 points, some of which are land."""
    x = rows_of_all(n, 24, mean=1.0).reshape(n, 4, 6)
    land = np.zeros((4, 6), bool)
    land[1, 2:5] = land[3, 0] = True
    return x, land


@pytest.mark.parametrize("form", ["nc", "h5", "npy"])
def test_missing_columns_are_left_out(form, tmp_path):
    x, land = field()
    gaps = np.where(land, np.nan, x)
    name = {"nc": "x.nc:x", "h5": "x.h5:x", "npy": "x.npy"}[form]
    if form == "nc":
        write_netcdf(tmp_path / "x.nc", np.where(land, -999.0, x), _FillValue=np.float64(-999))
    elif form == "h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file["x"] = np.where(land, -999.0, x)
            file["x"].attrs["missing_value"] = [-999.0]
    else:
        np.save(tmp_path / "x.npy", gaps)
    weights = np.random.default_rng(0).random((4, 6))
    weights[0, 0] = 0
    np.save(tmp_path / "areas.npy", weights)
    np.save(tmp_path / "sea.npy", np.where(land, np.nan, 1.0))

    def program(mask, weights):
        def run(comm):
            settings = {"n_components": 2, "tol": 1e-13, "comm": comm, "overwrite": True}
            return decompose_file(str(tmp_path / name), tmp_path / "out", mask=mask, column_weights=weights, **settings)

        return virtual.run(2, run)[0], np.load(tmp_path / "out/components.npy"), np.load(tmp_path / "out/mean.npy")

    for mask in ("auto", str(tmp_path / "sea.npy")):
        summary, components, mean = program(mask, None)
        assert (summary["columns"], summary["columns_left_out"]) == (20, 4)
        np.testing.assert_array_equal(np.isnan(components), np.tile(land.ravel(), (2, 1)))
        np.testing.assert_allclose(components[:, ~land.ravel()], exact(x[:, ~land])[1][:2], atol=1e-7)
        np.testing.assert_allclose(mean, np.where(land, np.nan, x.mean(axis=0)).ravel(), rtol=1e-10)
    _, components, mean = program("auto", str(tmp_path / "areas.npy"))
    kept = ~land & (weights > 0)
    np.testing.assert_allclose(components[:, kept.ravel()], exact(x[:, kept] * np.sqrt(weights[kept]))[1][:2], atol=1e-7)
    np.testing.assert_allclose(mean, np.where(kept, x.mean(axis=0), np.nan).ravel(), rtol=1e-10)
    with pytest.raises(DataError, match=r"4 of 24 columns are NaN or infinite .* column 8; `mask='auto'`"):
        program(None, None)


@pytest.mark.parametrize("dtype", ["int16", "int8"])
def test_packed_numbers_are_unpacked(dtype, tmp_path):
    x = np.random.default_rng(0).integers(-90, 90, (9, 5)).astype(dtype)
    x[3, 2] = -100
    attributes = {"scale_factor": np.float32(0.5), "add_offset": np.float32(20), "missing_value": np.array(-100, dtype)}
    write_netcdf(tmp_path / "x.nc", x, **attributes)
    matrix = open_matrix(str(tmp_path / "x.nc:x"))
    wanted = np.where(x == -100, np.nan, 0.5 * x.astype(np.float32) + 20)
    assert matrix.dtype == np.float32
    np.testing.assert_array_equal(matrix.read(range(1, 7)), wanted[1:7])


@pytest.mark.parametrize("value", ["much", [1.0, 2.0]])
def test_packed_by_what_is_no_number(value, tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.ones((3, 2))
        file["x"].attrs["scale_factor"] = value
    with pytest.raises(DataError, match=r"x\.h5:x: attribute scale_factor: got .*, expected a number"):
        open_matrix(str(tmp_path / "x.h5:x"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask": "land.txt"}, "mask: got 'land.txt', expected auto, or an .npy file"),
        ({"mask": "{}/short.npy"}, r"short.npy holds float64 of shape \(5,\), expected numbers of shape"),
        ({"column_weights": "{}/minus.npy"}, "minus.npy holds NaN, infinity or negative numbers"),
        ({"column_weights": "auto"}, "column_weights: got 'auto', expected an .npy file"),
        ({"mask": "{}/zero.npy"}, "leave out all 24 columns"),
        ({"mask": "{}/nothing.npy"}, "nothing.npy: no such file"),
    ],
)
def test_masks_that_make_no_sense(settings, message, tmp_path):
    np.save(tmp_path / "x.npy", field()[0])
    for name, array in {"short": np.ones(5), "minus": -np.ones((4, 6)), "zero": np.zeros((4, 6))}.items():
        np.save(tmp_path / f"{name}.npy", array)
    given = {name: value.format(tmp_path) for name, value in settings.items()}
    with pytest.raises((UsageError, DataError), match=message):
        decompose_file(str(tmp_path / "x.npy"), tmp_path / "out", n_components=2, **given)
    assert not (tmp_path / "out/components.npy").exists()


def test_the_footprint_is_seen_at_its_peak():
    before = footprint()
    with Peak() as peak:
        large = np.ones(20_000_000)  # more than what is freed is kept
        while peak.bytes < before + large.nbytes // 2:
            large += 1
        del large
    assert before + 8e7 < peak.bytes
    assert json.dumps(peak.bytes)
