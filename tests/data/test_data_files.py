"""Every format: what is written is what is read, no more than own rows, and damaged files are refused."""

from __future__ import annotations

import gzip
import struct
import tracemalloc

import numpy as np
import pytest
from harness.data_sources import check_source, rng

from mpiddl.data import ShardedRows, open_data
from mpiddl.errors import DataError, UsageError
from mpiddl.layout import Layout

pytestmark = pytest.mark.no_mpi

RECORD = 3073


def write(path, content):
    """Write bytes, packed if the name says so."""
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)


def idx(array):
    return (
        struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def write_idx(folder, end="", train=50, test=20):
    """Write the four MNIST files; return the arrays."""
    arrays = []
    for part, n in (("train", train), ("t10k", test)):
        x, y = rng().integers(0, 256, (n, 4, 3)), np.arange(n) % 5
        write(folder / f"{part}-images-idx3-ubyte{end}", idx(x))
        write(folder / f"{part}-labels-idx1-ubyte{end}", idx(y))
        arrays += [x, y]
    return arrays


def write_cifar(folder, end="", batches=(1, 2), rows=7):
    """Write batches and a test batch; return all training records."""
    records = rng().integers(0, 256, (len(batches) * rows, RECORD)).astype(np.uint8)
    records[:, 0] %= 10
    for number, part in zip(batches, np.split(records, len(batches)), strict=True):
        write(folder / f"data_batch_{number}.bin{end}", part.tobytes())
    write(folder / f"test_batch.bin{end}", records[:3].tobytes())
    return records


# --- idx


@pytest.mark.parametrize("end", ["", ".gz"])
def test_idx_files(tmp_path, end):
    x, y, x_test, y_test = write_idx(tmp_path, end)
    data = open_data(tmp_path)
    assert (data.name, data.classes, data.features, data.train.shape) == (tmp_path.name, 5, 12, (4, 3))
    check_source(data.train, x, y)
    check_source(data.test, x_test, y_test)
    assert "train-images" in data.train.where(3)


def test_idx_files_in_the_other_spelling_or_unpacked_under_their_old_name(tmp_path):
    write_idx(tmp_path, ".gz")
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / path.name.replace("-idx", ".idx"))
    packed = tmp_path / "train-images.idx3-ubyte.gz"
    packed.write_bytes(gzip.decompress(packed.read_bytes()))
    assert open_data(tmp_path).train.n == 50


def test_idx_without_a_test_set_holds_rows_out(tmp_path):
    write_idx(tmp_path)
    for name in ("images-idx3", "labels-idx1"):
        (tmp_path / f"t10k-{name}-ubyte").unlink()
    data = open_data(tmp_path, test_fraction=0.3)
    assert (data.train.n, data.test.n) == (35, 15)


def damage(content, at, new):
    return content[:at] + new + content[at + len(new) :]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "train-images-idx3-ubyte",
            lambda b: damage(b, 0, b"\0\0\x0d\x03"),
            "number 0x00000d03, expected 0x00000803",
        ),
        ("train-images-idx3-ubyte", lambda b: damage(b, 3, b"\1"), "0x00000801, expected .* with 3 dimensions"),
        ("t10k-labels-idx1-ubyte", lambda b: damage(b, 3, b"\3"), "0x00000803, expected .* with 1 dimension"),
        ("train-images-idx3-ubyte", lambda b: b[:9], "got 9 bytes, expected a header of 16"),
        (
            "train-labels-idx1-ubyte",
            lambda b: idx(np.zeros(49)),
            "labels-idx1-ubyte.*: got 49 labels, expected 50, one label for each row of .*images",
        ),
        ("train-labels-idx1-ubyte", lambda b: damage(b, 20, b"\xff"), "row 12: got label 255"),
        (
            "t10k-labels-idx1-ubyte",
            lambda b: damage(b, 20, b"\5"),
            "row 12: got label 5, expected 0 to 4",
        ),
        (
            "t10k-images-idx3-ubyte",
            lambda b: idx(np.zeros((20, 3, 3))),
            r"got shape \(3, 3\), expected \(4, 3\)",
        ),
        ("train-images-idx3-ubyte", lambda b: b"", "got 0 bytes, expected a header"),
    ],
)
@pytest.mark.parametrize("end", ["", ".gz"])
def test_damaged_idx_files_are_refused(tmp_path, name, change, message, end):
    write_idx(tmp_path, end)
    path = tmp_path / f"{name}{end}"
    content = path.read_bytes()
    write(path, change(gzip.decompress(content) if end else content))
    with pytest.raises(DataError, match=message) as caught:
        read_all(open_data(tmp_path))
    assert name.split("-")[1] in str(caught.value)


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        ("", lambda b: b[:-1], r"got 615 bytes, expected 616 bytes for the shape \(50, 4, 3\)"),
        ("", lambda b: b + b"\0", "got 617 bytes, expected 616"),
        (
            ".gz",
            lambda b: damage(b, 8, b"\xff"),
            r"bytes, expected .* for the shape \(50, 4278190084, 3\)",
        ),
        (".gz", lambda b: b[:-1], r"unpacks to fewer bytes than the 50 rows of shape \(4, 3\)"),
        (".gz", lambda b: b + b"\0", "unpacks to more bytes than the 50 rows"),
    ],
)
def test_idx_files_of_another_length_than_they_promise_are_refused(tmp_path, end, change, message):
    images, _, _, _ = write_idx(tmp_path, end)
    path = tmp_path / f"train-images-idx3-ubyte{end}"
    write(path, change(idx(images)))
    with pytest.raises(DataError, match=message):
        read_all(open_data(tmp_path))


def read_all(data):
    for source in (data.train, data.test):
        ShardedRows(source, Layout(source.n, 4), [0, 1])


@pytest.mark.parametrize("keep", [1, 12, 200, -4])
def test_truncated_gzip_is_refused_on_every_rank(tmp_path, keep):
    """Also where the wanted rows come before the damage."""
    write_idx(tmp_path, ".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz: .*(truncated|header|magic)"):
        read_all(open_data(tmp_path))


def test_a_flipped_bit_in_a_gzip_file_is_noticed(tmp_path):
    write_idx(tmp_path, ".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    packed = bytearray(path.read_bytes())
    packed[-5] ^= 1  # in the checksum
    path.write_bytes(packed)
    with pytest.raises(DataError, match=r"train-images.*CRC"):
        read_all(open_data(tmp_path))


def test_a_missing_companion_is_named(tmp_path):
    write_idx(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"the file train-labels-idx1-ubyte\[.gz\] is missing"):
        open_data(tmp_path)


def test_a_packed_file_is_never_whole_in_memory(tmp_path):
    images, rows = np.zeros((40_000, 28, 28), np.uint8), 40_000 // 16
    write(tmp_path / "train-images-idx3-ubyte.gz", idx(images))
    write(tmp_path / "train-labels-idx1-ubyte", idx(np.arange(40_000) % 10))
    source = open_data(tmp_path, test_fraction=0).train
    tracemalloc.start()
    ShardedRows(source, Layout(40_000, 16), [3])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < rows * 784 + 6e6 < images.nbytes / 3


# --- CIFAR-10


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("batches", [(1,), (1, 2), (2, 3, 5)])
def test_cifar_batches(tmp_path, end, batches):
    records = write_cifar(tmp_path, end, batches)
    data = open_data(tmp_path)
    assert (data.classes, data.features, data.train.shape, data.test.n) == (10, 3072, (3, 32, 32), 3)
    source = data.train
    assert source.n == len(records)
    for ranges in ([range(source.n)], [range(2, 4), range(5, source.n - 1)], [range(7, 7)]):
        for rows, (x, y) in zip(ranges, source.read(ranges), strict=True):
            np.testing.assert_array_equal(x, records[rows.start : rows.stop, 1:])
            np.testing.assert_array_equal(y, records[rows.start : rows.stop, 0])
    assert f"data_batch_{batches[-1]}.bin{end}, row 6" in source.where(source.n - 1)


def test_cifar_without_a_test_batch_holds_rows_out(tmp_path):
    write_cifar(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    data = open_data(tmp_path)
    assert (data.train.n, data.test.n) == (11, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-1], "got 21510 bytes.*, expected a multiple of 3073"),
        (lambda b: b"", " got 0 bytes"),
        (lambda b: damage(b, 2 * RECORD, b"\x0a"), "row 2: got label 10, expected 0 to 9"),
    ],
)
@pytest.mark.parametrize("end", ["", ".gz"])
def test_damaged_cifar_batches_are_refused(tmp_path, end, change, message):
    write_cifar(tmp_path, end)
    path = tmp_path / f"data_batch_2.bin{end}"
    content = path.read_bytes()
    write(path, change(gzip.decompress(content) if end else content))
    with pytest.raises(DataError, match=rf"data_batch_2\.bin.*{message}"):
        source = open_data(tmp_path).train
        ShardedRows(source, Layout(source.n, 1), [0])


def test_a_truncated_cifar_gzip_is_refused(tmp_path):
    write_cifar(tmp_path, ".gz")
    path = tmp_path / "data_batch_1.bin.gz"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DataError, match=r"data_batch_1.bin.gz: .*truncated"):
        source = open_data(tmp_path).train
        source.read([range(1)])


def test_cifar_is_no_regression(tmp_path):
    write_cifar(tmp_path)
    with pytest.raises(UsageError, match="expected 'classification' for CIFAR-10"):
        open_data(tmp_path, task="regression")
