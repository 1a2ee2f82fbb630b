"""numpy's own files: a folder with ``x_train.npy``, ``y_train.npy`` ..., or an ``.npz`` of such arrays.

``.npy`` files and members stored without compression (`numpy.savez`) are mapped; compressed members
(`numpy.savez_compressed`) are unpacked in chunks by every rank, which keeps only its own rows.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import IO

import numpy as np
from numpy.lib import format as npy_format

from ..errors import DataError
from .arrays import arrays_data
from .base import Data
from .hold_out import TEST_FRACTION
from .labels import Task
from .rows import MappedRows, RowArray, StreamedRows, reading, unpacked

NAMES = (("x_train", "y_train"), ("x", "y"))
TEST_NAMES = ("x_test", "y_test")
WANTED = "x_train.npy and y_train.npy, or x.npy and y.npy (numpy)"


def matches(folder: Path) -> bool:
    """Return whether a folder holds the features of one of the pairs."""
    return any((folder / f"{name}.npy").exists() for pair in NAMES for name in pair)


def npy_data(
    folder: Path, task: Task | None = None, test_fraction: float = TEST_FRACTION, class_names: Sequence[str] | None = None
) -> Data:
    """Open a folder of ``.npy`` files; without test files a part of the rows is held out for testing.

    Raises
    ------
    DataError
        If a file is missing, damaged, or holds Python objects.
    """
    present = sorted(path.stem for path in folder.glob("*.npy"))
    return _data(
        folder.name, f"{folder}", present, lambda name: open_npy(folder / f"{name}.npy"), task, test_fraction, class_names
    )


def npz_data(
    path: Path, task: Task | None = None, test_fraction: float = TEST_FRACTION, class_names: Sequence[str] | None = None
) -> Data:
    """Open an ``.npz`` file; without ``x_test`` and ``y_test`` in it a part is held out for testing.

    Raises
    ------
    DataError
        If it is no ``.npz`` file, lacks an array, is damaged, or holds Python objects.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            present = sorted(name.removesuffix(".npy") for name in archive.namelist())
    except zipfile.BadZipFile as error:
        raise DataError(
            f"{path}: the file is truncated, or not an .npz file, which is a zip archive of .npy files ({error})"
        ) from error
    return _data(
        path.stem, f"{path}", present, lambda name: open_member(path, f"{name}.npy"), task, test_fraction, class_names
    )


def _data(
    name: str,
    where: str,
    present: Sequence[str],
    opened: Callable[[str], RowArray],
    task: Task | None,
    test_fraction: float,
    class_names: Sequence[str] | None,
) -> Data:
    """Return the data set made of the arrays of the agreed names among those that are present."""
    names = next((pair for pair in NAMES if set(pair) <= set(present)), None)
    tested = set(TEST_NAMES) & set(present)
    if names is None or len(tested) == 1:
        wanted = "x_train and y_train, or x and y" if names is None else "both x_test and y_test, or neither"
        raise DataError(f"{where}: got {', '.join(present) or 'no arrays'}, expected {wanted}")
    arrays = [opened(key) for key in names + TEST_NAMES * bool(tested)]
    arrays[1::2] = [unpacked(labels) for labels in arrays[1::2]]
    return arrays_data(*arrays, name=name, task=task, test_fraction=test_fraction, class_names=class_names)


def open_npy(path: Path) -> RowArray:
    """Return a ``.npy`` file as an array of rows, with only the header read."""
    with reading(path), open(path, "rb") as file:
        shape, fortran, dtype = _header(file, str(path))
        offset = file.tell()
    _check_size(str(path), os.path.getsize(path) - offset, shape, dtype)
    return MappedRows(str(path), str(path), offset, shape, dtype, fortran)


def open_member(path: Path, member: str) -> RowArray:
    """Return a member of an ``.npz`` file as an array of rows, with only the header read."""
    name = f"{member.removesuffix('.npy')} in {path}"

    def open_packed() -> IO[bytes]:
        try:
            return zipfile.ZipFile(path).open(member)
        except (NotImplementedError, RuntimeError) as error:  # an unknown method, a password
            raise DataError(f"{name}: cannot be unpacked ({error})") from error

    with reading(path), open_packed() as file, zipfile.ZipFile(path) as archive:
        shape, fortran, dtype = _header(file, name)
        skip, info = file.tell(), archive.getinfo(member)
    _check_size(name, info.file_size - skip, shape, dtype)
    if info.compress_type == zipfile.ZIP_STORED:
        return MappedRows(name, str(path), _member_start(path, info) + skip, shape, dtype, fortran)
    if fortran:
        raise DataError(f"{name}: got a compressed array in Fortran order, expected C order: save np.ascontiguousarray(array)")
    return StreamedRows(name, str(path), open_packed, skip, shape, dtype)


def _check_size(name: str, size: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Refuse an array of which there are fewer bytes than its header promises, or more."""
    wanted = prod(shape) * dtype.itemsize
    if size != wanted:
        why = "truncated" if size < wanted else "damaged, or several arrays in one file"
        raise DataError(f"{name}: got {size} bytes, expected {wanted} bytes for {dtype} of shape {shape}: {why}")


def _header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, column order and dtype from the header of a ``.npy`` stream."""
    try:
        version = npy_format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = npy_format.read_array_header_1_0(file)
        else:
            shape, fortran, dtype = npy_format.read_array_header_2_0(file)
    except (
        ValueError,
        TypeError,
        SyntaxError,
        TokenError,
    ) as error:  # numpy's parser lets its own errors through
        raise DataError(f"{name}: not a .npy array ({error})") from error
    if len(shape) > 32 or any(n < 0 for n in shape):
        raise DataError(f"{name}: got shape {shape} in the header, expected at most 32 axes, each of length 0 or more")
    if dtype.hasobject:
        raise DataError(
            f"{name}: got Python objects (dtype {dtype}), expected numbers or strings; convert numbers with "
            "x.astype(float), labels with y.astype(str). "
            "Objects are not read, because pickle can run code"
        )
    return shape, fortran, dtype


def _member_start(path: Path, info: zipfile.ZipInfo) -> int:
    """Return where the bytes of a stored member begin: behind its local header (PKWARE APPNOTE 4.3.7)."""
    with reading(path), open(path, "rb") as file:
        file.seek(info.header_offset)
        name_size, extra_size = struct.unpack("<26x2H", file.read(30))
    return info.header_offset + 30 + name_size + extra_size
