"""One matrix in a file, of which each rank reads its own rows: for decompositions, which want no labels.

| name ends in | what it is |
| --- | --- |
| ``.npy`` | numpy's array; C order and float32 or float64 is mapped and never read as a whole |
| ``.npz``, ``.npz:NAME`` | an archive of arrays with one, or the one of that name; or `scipy.sparse.save_npz`'s matrix |
| ``-ubyte``, ``-ubyte.gz`` | MNIST's format |
| ``.h5:NAME``, ``.hdf5:NAME``, ``.nc:NAME`` | a data set of an HDF5 or NetCDF-4 file, where h5py is installed |
| ``.nc:NAME`` | a variable of a NetCDF-3 file |

All dimensions but the first are taken together as columns. Numbers that a file packs (``scale_factor``, ``add_offset``) are
unpacked, and those that it calls missing (``_FillValue``, ``missing_value``) are NaN: the conventions of NetCDF, in HDF5 too.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, UsageError
from .idx import open_idx
from .npy import open_member, open_npy
from .rows import MappedRows, RowArray, StreamedRows, reading
from .sparse import checked_csr

HDF5 = (".h5", ".hdf5", ".nc", ".nc4")
WANTED = "a file that ends in .npy, .npz, -ubyte, -ubyte.gz, .h5:NAME or .nc:NAME"

INDEX_ARRAYS = {"indices", "indptr", "row", "col", "coords", "offsets"}
"""Of the files of `scipy.sparse.save_npz`."""


@dataclass(frozen=True)
class Matrix:
    """A matrix of ``n`` rows, each of ``shape`` (before it is made flat); ``read(range)`` gives some of them.

    What it gives is an array (len(range), d) of float32 or float64, or a SciPy CSR matrix: a view of the file if it is
    `mapped`, else read. `parts`: some rows can be read without the others. `kept`: which columns it has, None: all; `factors`
    of the file's columns: what they have been multiplied by, None: nothing.
    """

    name: str
    n: int
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[range], Any]
    mapped: bool = False
    parts: bool = True
    kept: np.ndarray | None = None
    factors: np.ndarray | None = None

    @property
    def d(self) -> int:
        return prod(self.shape) if self.kept is None else int(self.kept.sum())

    def missing(self) -> np.ndarray:
        """Which columns are not finite in the first row, (d,)."""
        first = self.read(range(min(1, self.n)))
        return ~np.isfinite(first.toarray() if is_sparse(first) else first).all(axis=0)

    def select(self, kept: np.ndarray, factors: np.ndarray | None = None) -> Matrix:
        """The columns where ``kept`` (d,) is True, each times its one of ``factors`` (d,)."""
        scale = None if factors is None else factors[kept].astype(self.dtype)

        def read(rows: range) -> Any:
            x = self.read(rows)[:, places]
            if scale is None:
                return x
            return x.multiply(scale).tocsr() if is_sparse(x) else np.multiply(x, scale, out=x)

        places = np.flatnonzero(kept)
        return replace(self, read=read, mapped=False, kept=kept, factors=factors)

    def spread(self, columns: np.ndarray) -> np.ndarray:
        """What belongs to columns (..., d), with NaN for those that are not kept."""
        if self.kept is None:
            return columns
        whole = np.full((*columns.shape[:-1], len(self.kept)), np.nan, columns.dtype)
        whole[..., self.kept] = columns
        return whole


def open_matrix(file: str | os.PathLike[str]) -> Matrix:
    """Open a file by its name, with only its header read.

    Raises
    ------
    UsageError
        The name ends in nothing that is known; or it needs a library that is missing.
    DataError
        There is no such file; it is damaged; what it holds are not real numbers, or no matrix.
    """
    name = os.fspath(file)
    path, _, member = (name, "", "") if os.path.exists(name) else name.rpartition(":") if ":" in name else (name, "", "")
    if path.endswith(".npz"):
        return _open_archive(Path(path), member)
    if path.endswith(HDF5):
        return (_open_netcdf3 if _begins(path, b"CDF") else _open_hdf5)(Path(path), member)
    if path.endswith(".npy"):
        return _of_rows(open_npy(Path(path)))
    if path.removesuffix(".gz").endswith("-ubyte"):
        return _of_rows(open_idx(Path(path)))
    raise UsageError(f"file: got {name!r}, expected {WANTED}")


def is_sparse(x: Any) -> bool:
    """Whether it is a sparse matrix or array of SciPy; SciPy is not loaded for it."""
    sparse = sys.modules.get("scipy.sparse")
    return sparse is not None and sparse.issparse(x)


def float_of(dtype: np.dtype) -> np.dtype:
    """The float type that holds numbers of ``dtype``: float32 for small integers and half floats."""
    return np.result_type(dtype, np.float32)


def _of_rows(array: RowArray) -> Matrix:
    def read(rows: range) -> np.ndarray:
        return np.ascontiguousarray(array.read([rows])[0].reshape(len(rows), prod(array.shape[1:])), dtype)

    dtype = _check(array.name, array.shape, array.dtype)
    mapped = isinstance(array, MappedRows) and array.dtype == dtype and not array.fortran
    return Matrix(array.name, array.shape[0], tuple(array.shape[1:]), dtype, read, mapped, not isinstance(array, StreamedRows))


def _check(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.dtype:
    """The float type to work in, if this is a matrix of real numbers."""
    if dtype.kind not in "uif" or dtype.itemsize > 8:
        raise DataError(f"{name}: got {dtype}, expected real numbers of at most 64 bits")
    if len(shape) < 2:
        raise DataError(f"{name}: got shape {shape}, expected two or more dimensions: rows and columns")
    return float_of(dtype)


def _open_archive(path: Path, member: str) -> Matrix:
    with reading(path), zipfile.ZipFile(path) as archive:
        names = [entry.removesuffix(".npy") for entry in archive.namelist()]
    if not member and {"format", "data", "shape"} <= set(names):
        return _open_sparse(path, set(names))
    if member and member not in names:
        raise DataError(f"{path}: got the array name {member!r}, expected one of {', '.join(names)}")
    if not member and len(names) != 1:
        raise UsageError(f"file: got {path} without an array name, expected one of the arrays in this file "
                         f"({', '.join(names) or 'there are none'}): {path}:{names[0] if names else 'NAME'}")
    return _of_rows(open_member(path, f"{member or names[0]}.npy"))


def _open_sparse(path: Path, names: set[str]) -> Matrix:
    from scipy import sparse

    for name in sorted(names & INDEX_ARRAYS):  # SciPy would cut fractions off
        kind = open_member(path, f"{name}.npy").dtype
        if kind.kind not in "iu":
            raise DataError(f"{path}: {name}: got {kind}, expected integers")
    with reading(path):
        try:
            found = sparse.load_npz(path)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, NotImplementedError) as error:
            raise DataError(f"{path}: the file is damaged, or contains no sparse matrix ({error})") from None
    whole = checked_csr(found, str(path))
    dtype = _check(str(path), whole.shape, whole.dtype)
    return Matrix(str(path), whole.shape[0], whole.shape[1:], dtype, lambda rows: whole[rows.start : rows.stop].astype(dtype),
                  parts=False)


def _open_hdf5(path: Path, member: str) -> Matrix:
    try:
        import h5py
    except ImportError:
        raise UsageError(f"file: {path} needs h5py, which is not installed. Install it with: pip install "
                         "'mpiddl[hdf5]'") from None
    with reading(path), h5py.File(path, "r") as file:
        found: list[str] = []
        file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
        _check_member(path, member.lstrip("/"), found)
        shape, kind, meaning = file[member].shape, file[member].dtype, _meaning(f"{path}:{member}", file[member].attrs.get)

    def read(rows: range) -> np.ndarray:
        with reading(path), h5py.File(path, "r") as opened:  # each rank for itself, its own rows
            return opened[member][rows.start : rows.stop]

    return _of_variable(f"{path}:{member}", shape, kind, meaning, read)


def _open_netcdf3(path: Path, member: str) -> Matrix:
    from scipy.io import netcdf_file

    def opened() -> Any:
        try:
            return netcdf_file(path, "r", mmap=True, maskandscale=False)
        except (ValueError, TypeError, IndexError) as error:
            raise DataError(f"{path}: the file is damaged, or has a NetCDF format that SciPy does not read ({error})") from None

    with reading(path), opened() as file:
        _check_member(path, member, list(file.variables))
        shape, kind = file.variables[member].shape, file.variables[member].data.dtype
        meaning = _meaning(f"{path}:{member}", lambda name: getattr(file.variables[member], name, None))

    def read(rows: range) -> np.ndarray:
        with reading(path), opened() as again:
            return np.array(again.variables[member].data[rows.start : rows.stop], kind.newbyteorder("="))

    return _of_variable(f"{path}:{member}", shape, kind, meaning, read)


def _check_member(path: Path, member: str, found: list[str]) -> None:
    if member not in found:
        raise UsageError(f"file: got the variable name {member!r} for {path}, expected one of the variables in this file "
                         f"({', '.join(found) or 'there are none'}): {path}:NAME")


def _meaning(where: str, attribute: Callable[[str], Any]) -> tuple[list[Any], np.generic | None, np.generic | None]:
    """Of stored numbers: which of them are missing, the scale and the offset."""
    found = {}
    for name in ("_FillValue", "missing_value", "scale_factor", "add_offset"):
        value = attribute(name)
        if value is not None:
            if np.size(value) != 1 or np.asarray(value).dtype.kind not in "buif":
                raise DataError(f"{where}: attribute {name}: got {value!r}, expected a number")
            found[name] = np.ravel(value)[0]
    missing = [found[name] for name in ("_FillValue", "missing_value") if name in found]
    return missing, found.get("scale_factor"), found.get("add_offset")


def _of_variable(name: str, shape: tuple[int, ...], kind: np.dtype, meaning: tuple[list[Any], Any, Any],
                 read: Callable[[range], np.ndarray]) -> Matrix:
    """A matrix of stored numbers that have a meaning."""
    missing, scale, offset = meaning
    dtype = _check(name, shape, kind)
    for number in (scale, offset):
        if number is not None:
            dtype = np.result_type(dtype, np.asarray(number).dtype)

    def values(rows: range) -> np.ndarray:
        stored = read(rows).reshape(len(rows), prod(shape[1:]))
        found = stored.astype(dtype, copy=False)
        for value in missing:
            gaps = stored == value
            if gaps.any():
                found = np.where(gaps, dtype.type(np.nan), found)
        if scale is not None:
            found = found * dtype.type(scale)
        return found if offset is None else found + dtype.type(offset)

    return Matrix(name, shape[0], tuple(shape[1:]), dtype, values)


def _begins(path: str, magic: bytes) -> bool:
    with reading(path), open(path, "rb") as file:
        return file.read(len(magic)) == magic
