"""Files of numpy: what is written is what is read, no more than own rows, and damaged files are refused."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
from harness.data_sources import check_source, pair, rng

from mpiddl.data import ShardedRows, open_data
from mpiddl.errors import DataError
from mpiddl.layout import Layout

pytestmark = pytest.mark.no_mpi


def save_folder(folder, **arrays):
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def save_npz(folder, **arrays):
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


def save_packed(folder, **arrays):
    np.savez_compressed(folder / "data.npz", **arrays)
    return folder / "data.npz"


SAVE = pytest.mark.parametrize("save", [save_folder, save_npz, save_packed])


@SAVE
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64", ">f4"])
def test_numpys_files(tmp_path, save, dtype):
    x, y = pair(dtype=dtype)
    data = open_data(save(tmp_path, x_train=x, y_train=y, x_test=x[::2], y_test=y[::2]))
    assert (data.classes, data.features, data.train.shape) == (4, 6, (2, 3))
    check_source(data.train, x, y)
    check_source(data.test, x[::2], y[::2])
    assert "x_train" in data.train.where(0)


@SAVE
def test_numpys_files_without_a_test_set_hold_rows_out(tmp_path, save):
    x, y = pair()
    data = open_data(save(tmp_path, x=x, y=y))
    assert (data.train.n, data.test.n) == (32, 8)
    again = open_data(save(tmp_path, x=x, y=y))
    np.testing.assert_array_equal(data.test.read([range(8)])[0][0], again.test.read([range(8)])[0][0])


@pytest.mark.parametrize("save", [save_folder, save_npz])
def test_arrays_stored_column_by_column(tmp_path, save):
    x, y = np.asfortranarray(rng().normal(size=(20, 3))), np.arange(20) % 2
    check_source(open_data(save(tmp_path, x_train=x, y_train=y, x_test=x, y_test=y)).train, x, y)


def test_compressed_columns_are_refused_with_a_remedy(tmp_path):
    x = np.asfortranarray(np.ones((20, 3)))
    with pytest.raises(
        DataError, match=r"x in .*data.npz: got a compressed array in Fortran order, expected .*np.ascontiguous"
    ):
        open_data(save_packed(tmp_path, x=x, y=np.zeros(20, int)))


@SAVE
def test_targets_of_a_regression(tmp_path, save):
    x, y = pair()[0], rng().normal(size=(40, 2))
    data = open_data(save(tmp_path, x_train=x, y_train=y, x_test=x, y_test=y))
    assert (data.classes, data.outputs) == (None, 2)
    check_source(data.train, x, y)


def test_mapped_files_are_read_where_the_rows_are(tmp_path):
    """A file of 16 GB, nearly all of it a hole: reading it whole would take minutes and all memory."""
    n, columns = 1 << 14, 1 << 20
    np.save(tmp_path / "y.npy", np.arange(n) % 10)
    with open(tmp_path / "x.npy", "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (n, columns)}
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
        file.seek(start + 1001 * columns)
        file.write(bytes([51]))
        file.truncate(start + n * columns)
    source = open_data(tmp_path, test_fraction=0).train
    held = ShardedRows(source, Layout(n, n // 2, batch=n), [500])  # rows 1000 and 1001
    x, y = held.batch(0, 0)
    assert sorted(zip(y.tolist(), (x[:, 0] * 255).round().tolist(), strict=True)) == [(0, 0.0), (1, 51.0)]


@SAVE
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"x_train": np.ones((3, 1)), "labels": np.zeros(3)},
            "got labels, x_train, expected x_train and y_train, or x and y",
        ),
        ({"x": np.ones((3, 1)), "y": np.zeros(3, int), "x_test": np.ones((3, 1))}, "both x_test and y_test"),
        ({"x": np.ones((3, 1)), "y": np.zeros(4, int)}, "got 4 labels, expected 3, one label for each row of .*x"),
        ({"x": np.ones((0, 1)), "y": np.zeros(0, int)}, "expected at least one row"),
        ({"x": np.ones(3), "y": np.zeros(3, int)}, r"got shape \(3,\)"),
        ({"x": np.ones((3, 1)), "y": np.array([0, None, 1])}, "y.*: got Python objects"),
        ({"x": np.array([[1], [None]]), "y": np.zeros(2, int)}, "x.*: got Python objects.*pickle"),
        ({"x": np.ones((3, 1)), "y": np.array([0, 1, -1])}, "row 2: got label -1"),
    ],
)
def test_numpys_files_that_do_not_fit_are_refused(tmp_path, save, arrays, message):
    path = save(tmp_path, **arrays)
    with pytest.raises(DataError, match=message) as caught:
        open_data(path)
    assert str(tmp_path) in str(caught.value)


def test_nan_is_named_with_file_row_and_column(tmp_path):
    x, y = pair()
    x[17, 1, 1] = np.nan
    source = open_data(save_npz(tmp_path, x_train=x, y_train=y, x_test=x, y_test=y)).train
    with pytest.raises(DataError, match=r"x_train in .*data.npz, row 17, column 4: got nan"):
        ShardedRows(source, Layout(40, 4), [1])


@SAVE
def test_more_bytes_than_the_array_has_are_refused(tmp_path, save):
    """As where an array was saved into the file of another, which numpy reads without a word."""
    path = save(tmp_path, x=np.ones((30, 4)), y=np.zeros(30, int))
    if path.is_dir():
        with open(path / "x.npy", "ab") as file:
            np.save(file, np.ones(3))
    else:
        with zipfile.ZipFile(path) as archive:
            entries = {info.filename: archive.read(info) for info in archive.infolist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED if save is save_npz else zipfile.ZIP_DEFLATED) as archive:
            for name, content in entries.items():
                archive.writestr(name, content + bytes(8 * (name == "x.npy")))
    with pytest.raises(DataError, match=r"x.*: got \d+ bytes, expected 960 bytes for float64 of shape .*: .*several arrays"):
        open_data(path)


@pytest.mark.parametrize("save", [save_folder, save_npz])
def test_truncated_numpy_files_are_refused(tmp_path, save):
    path = save(tmp_path, x=np.ones((30, 4)), y=np.zeros(30, int))
    file = path / "x.npy" if path.is_dir() else path
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match="truncated"):
        open_data(path)


def test_what_is_no_npy_or_npz_is_refused(tmp_path):
    (tmp_path / "x.npy").write_bytes(b"hello")
    np.save(tmp_path / "y.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"x.npy: not a .npy array"):
        open_data(tmp_path)
    (tmp_path / "data.npz").write_bytes(b"hello")
    with pytest.raises(DataError, match=r"data.npz: the file is truncated, or not an .npz file"):
        open_data(tmp_path / "data.npz")
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        archive.writestr("x.npy", b"hello")
        archive.writestr("y.npy", b"hello")
    with pytest.raises(DataError, match=r"x in .*data.npz: not a .npy array"):
        open_data(tmp_path / "data.npz")


def test_a_damaged_member_is_refused(tmp_path):
    path = save_packed(tmp_path, x=rng().normal(size=(500, 4)), y=np.arange(500) % 5)
    content = bytearray(path.read_bytes())
    content[3000] ^= 255
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"data.npz: the file is truncated or damaged"):
        open_data(path).train.read([range(10)])
