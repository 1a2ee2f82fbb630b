"""One matrix in a file, of which each rank reads its own rows: for decompositions, which want no labels.

| name ends in | what it is |
| --- | --- |
| ``.npy`` | numpy's array; C order and float32 or float64 is mapped and never read as a whole |
| ``.npz``, ``.npz:NAME`` | an archive of arrays with one, or the one of that name; or `scipy.sparse.save_npz`'s matrix |
| ``-ubyte``, ``-ubyte.gz`` | MNIST's format |
| ``.h5:NAME``, ``.hdf5:NAME``, ``.nc:NAME`` | a data set of an HDF5 or NetCDF-4 file, where h5py is installed |

All dimensions but the first are taken together as columns.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, UsageError
from .idx import open_idx
from .npy import open_member, open_npy
from .rows import RowArray, reading

HDF5 = (".h5", ".hdf5", ".nc", ".nc4")
WANTED = "a file that ends in .npy, .npz, -ubyte, -ubyte.gz, .h5:NAME or .nc:NAME"


@dataclass(frozen=True)
class Matrix:
    """A matrix of ``n`` rows, each of ``shape`` (before it is made flat); ``read(range)`` gives some of them.

    What it gives is an array (len(range), d) of float32 or float64, or a SciPy CSR matrix.
    """

    name: str
    n: int
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[range], Any]

    @property
    def d(self) -> int:
        return prod(self.shape)


def open_matrix(name: str) -> Matrix:
    """Open a file by its name, with only its header read.

    Raises
    ------
    UsageError
        The name ends in nothing that is known; or it needs a library that is missing.
    DataError
        There is no such file; it is damaged; what it holds are not real numbers, or no matrix.
    """
    path, _, member = (name, "", "") if os.path.exists(name) else name.rpartition(":") if ":" in name else (name, "", "")
    if path.endswith(".npz"):
        return _open_archive(Path(path), member)
    if path.endswith(HDF5):
        return _open_hdf5(Path(path), member)
    if path.endswith(".npy"):
        return _of_rows(open_npy(Path(path)))
    if path.removesuffix(".gz").endswith("-ubyte"):
        return _of_rows(open_idx(Path(path)))
    raise UsageError(f"file: got {name!r}, wanted {WANTED}")


def float_of(dtype: np.dtype) -> np.dtype:
    """The float type that holds numbers of ``dtype``: float32 for small integers and half floats."""
    return np.result_type(dtype, np.float32)


def _of_rows(array: RowArray) -> Matrix:
    def read(rows: range) -> np.ndarray:
        return np.ascontiguousarray(array.read([rows])[0].reshape(len(rows), prod(array.shape[1:])), dtype)

    dtype = _check(array.name, array.shape, array.dtype)
    return Matrix(array.name, array.shape[0], tuple(array.shape[1:]), dtype, read)


def _check(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.dtype:
    """The float type to work in, if this is a matrix of real numbers."""
    if dtype.kind not in "uif" or dtype.itemsize > 8:
        raise DataError(f"{name}: {dtype} came, real numbers of at most 64 bits were wanted")
    if len(shape) < 2:
        raise DataError(f"{name}: the shape {shape} came, rows and columns were wanted")
    return float_of(dtype)


def _open_archive(path: Path, member: str) -> Matrix:
    with reading(path), zipfile.ZipFile(path) as archive:
        names = [entry.removesuffix(".npy") for entry in archive.namelist()]
    if not member and {"indptr", "indices", "data", "shape"} <= set(names):
        return _open_sparse(path)
    if member and member not in names:
        raise DataError(f"{path}: {member!r} came as the array's name, one of {', '.join(names)} was wanted")
    if not member and len(names) != 1:
        raise UsageError(f"file: {path} holds {', '.join(names)}; wanted one of them: {path}:{names[0] if names else 'NAME'}")
    return _of_rows(open_member(path, f"{member or names[0]}.npy"))


def _open_sparse(path: Path) -> Matrix:
    from scipy import sparse

    try:
        with reading(path):
            whole = sparse.load_npz(path).tocsr()
    except (ValueError, KeyError) as error:
        raise DataError(f"{path}: damaged, or no sparse matrix ({error})") from None
    dtype = _check(str(path), whole.shape, whole.dtype)
    return Matrix(str(path), whole.shape[0], whole.shape[1:], dtype, lambda rows: whole[rows.start : rows.stop].astype(dtype))


def _open_hdf5(path: Path, member: str) -> Matrix:
    try:
        import h5py
    except ImportError:
        raise UsageError(f"file: {path} needs h5py, which is not installed: pip install 'mpiddl[hdf5]'") from None
    with reading(path), h5py.File(path, "r") as file:
        found: list[str] = []
        file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
        if member.lstrip("/") not in found:
            raise UsageError(f"file: {path} holds {', '.join(found) or 'nothing'}; wanted one of them: {path}:NAME")
        shape, kind = file[member].shape, file[member].dtype
    dtype = _check(f"{path}:{member}", shape, kind)

    def read(rows: range) -> np.ndarray:
        with reading(path), h5py.File(path, "r") as opened:  # each rank for itself, its own rows
            return opened[member][rows.start : rows.stop].reshape(len(rows), prod(shape[1:])).astype(dtype, copy=False)

    return Matrix(f"{path}:{member}", shape[0], tuple(shape[1:]), dtype, read)
