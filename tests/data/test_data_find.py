"""Finding data by name, and real data: digits always, Fashion-MNIST and CIFAR-10 where someone has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpiddl.data import ShardedRows, open_data, sorted_warning
from mpiddl.errors import DataError, UsageError
from mpiddl.layout import Layout

pytestmark = pytest.mark.no_mpi

BESIDE = Path(__file__).parents[3] / "shared" / "data"
SEARCH = [*filter(None, os.environ.get("MPIDDL_DATA", "").split(os.pathsep)), BESIDE]


@pytest.fixture
def folder(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.ones((10, 2)), y=np.arange(10) % 2)
    (tmp_path / "set").mkdir()
    np.save(tmp_path / "set" / "x.npy", np.ones((5, 3)))
    np.save(tmp_path / "set" / "y.npy", np.zeros(5, int))
    return tmp_path


def test_a_path_or_a_name_in_the_search_path_is_found(folder, monkeypatch):
    assert open_data(folder / "set").features == 3
    assert open_data(str(folder / "mine.npz")).name == "mine"
    assert open_data("set", [folder / "nowhere", folder]).name == "set"
    assert open_data("mine.npz", [folder]).features == 2
    monkeypatch.setenv("HOME", str(folder))
    assert open_data("~/set").name == open_data("set", ["~"]).name == "set"
    monkeypatch.chdir(folder / "set")
    assert open_data(".").name == "set"


def test_an_unknown_name_lists_where_was_looked_and_what_is_near(folder):
    with pytest.raises(UsageError) as caught:
        open_data("sett", ["/no/such/place", folder])
    for part in ("'sett'", "'digits'", "/no/such/place/sett", str(folder / "sett"), "did you mean set?"):
        assert part in str(caught.value)
    with pytest.raises(UsageError, match=r"no search path is set: MPIDDL_DATA\); did you mean digits\?"):
        open_data("digit")
    with pytest.raises(UsageError, match=f"did you mean {folder}/mine.npz"):
        open_data(folder / "mine.npy")
    with pytest.raises(UsageError, match="data: got '', expected"):
        open_data("")


def test_a_folder_without_known_files_lists_what_came_and_what_was_wanted(folder):
    with pytest.raises(DataError) as caught:
        open_data(folder)
    for part in (
        str(folder),
        "got mine.npz, set",
        "train-images-idx3-ubyte",
        "data_batch_1.bin",
        "x_train.npy",
    ):
        assert part in str(caught.value)


def test_one_file_of_a_set_is_sent_back_to_its_folder(folder):
    with pytest.raises(UsageError, match=f"one file of a data set, expected the folder of the data set: {folder}/set"):
        open_data(folder / "set" / "x.npy")


@pytest.mark.parametrize("name", ["mine.npz", "set"])
def test_what_may_not_be_read_is_named(folder, monkeypatch, name):
    def refuse(path, *arguments, **keywords):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr("io.open", refuse)
    with pytest.raises(DataError, match=rf"{name}.*cannot be read \(Permission denied\)"):
        open_data(folder / name)


def test_digits_are_always_there():
    data = open_data("digits")
    assert (data.name, data.classes, data.features, data.train.n, data.test.n) == (
        "digits",
        10,
        64,
        1437,
        360,
    )
    held = ShardedRows(data.train, Layout(1437, 16), range(16))
    x = np.concatenate([x.copy() for x, _ in held.all_rows()])
    assert (x.min(), x.max(), x.dtype) == (0, 1, np.float32)
    assert sorted_warning(held.shard_labels(), 10) is None
    assert all(len(np.unique(labels)) == 10 for labels in held.shard_labels())


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    bunch, data = load_digits(), open_data("digits")
    parts = [source.read([range(source.n)])[0] for source in (data.train, data.test)]
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    rows = np.lexsort(np.column_stack([x * 16, y]).T)
    wanted = np.column_stack([bunch.data, bunch.target])
    np.testing.assert_array_equal(np.column_stack([x * 16, y])[rows], wanted[np.lexsort(wanted.T)])


def test_digits_load_no_heavy_package_and_no_mpi():
    code = (
        "import sys; from mpiddl.data import open_data; open_data('digits');"
        "print(*[m for m in ('sklearn', 'scipy.stats', 'mpi4py.MPI') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def real(name, *files):
    """Return a folder of real data on the search path, or skip."""
    for place in SEARCH:
        if all((Path(place) / name / file).exists() for file in files):
            return Path(place) / name
    return pytest.skip(f"{name} is not in MPIDDL_DATA: real data is not part of the project")


def test_fashion_mnist():
    folder = real("fashion-mnist", "train-images-idx3-ubyte.gz")
    data = open_data("fashion-mnist", [folder.parent])
    assert (data.classes, data.features, data.train.n, data.test.n) == (10, 784, 60_000, 10_000)
    layout = Layout(60_000, 16, batch=64)
    held = ShardedRows(data.train, layout, range(4, 8))
    x, _ = held.batch(0, 0)
    assert x.shape == (16, 784)
    assert 0 <= x.min() < x.max() <= 1
    assert sorted_warning(held.shard_labels(), 10) is None
    assert (
        abs(np.mean([x.mean() for x, _ in held.all_rows(1250)]) - 0.286) < 0.01
    )  # the mean that the field quotes
    assert np.bincount(np.concatenate(held.shard_labels())).min() > 1300


def test_cifar10_batches_that_are_the_first_records_of_the_official_ones(tmp_path):
    folder = real("cifar10", "train_first4000.bin.gz", "test_first1000.bin.gz")
    (tmp_path / "data_batch_1.bin.gz").symlink_to(folder / "train_first4000.bin.gz")
    (tmp_path / "test_batch.bin.gz").symlink_to(folder / "test_first1000.bin.gz")
    data = open_data(tmp_path)
    assert (data.train.n, data.test.n) == (4000, 1000)
    held = ShardedRows(data.test, Layout(1000, 2), [0, 1])
    assert next(held.all_rows(4))[1].tolist() == [3, 8, 8, 0]  # cat, ship, ship, aeroplane
