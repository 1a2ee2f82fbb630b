"""Row-major arrays, in memory or in files, of which only chosen ranges of rows are read.

Three ways to hold such an array: `MemoryRows`, `MappedRows` (a plain file, mapped: pages that are not touched
are not read) and `StreamedRows` (a compressed file, which has to be unpacked from its beginning, in small
chunks that are thrown away unless they are wanted). Cost of a read: the bytes of the wanted rows in memory; a
compressed file is unpacked to its end, because its checksum stands there.
"""

from __future__ import annotations

import gzip
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import IO, Protocol

import numpy as np

from ..errors import DataError

CHUNK_BYTES = 1 << 20  # small beside any data set, large enough that the loop costs nothing beside unpacking


class RowArray(Protocol):
    """An array whose first axis can be read by ranges."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def read(self, ranges: Sequence[range]) -> list[np.ndarray]:
        """Return one array for each of the ascending, disjoint ``ranges`` of rows."""
        ...


@contextmanager
def reading(path: str | os.PathLike) -> Iterator[None]:
    """Turn what goes wrong while reading ``path`` into a `DataError` that names it."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise DataError(f"{path}: got a pipe, socket or device, expected a regular file")  # it might never end
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: the file is truncated or damaged ({error}); download or copy it again") from error
    except OSError as error:  # PermissionError, a directory, an I/O error, a gzip checksum
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def is_gzip(path: str | os.PathLike) -> bool:
    """Return whether a file is gzip by its first two bytes: browsers unpack `.gz` files and keep the name."""
    with reading(path), open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def open_bytes(path: str | os.PathLike) -> IO[bytes]:
    """Open a gzip or plain file for reading its plain bytes."""
    return gzip.open(path, "rb") if is_gzip(path) else open(path, "rb")  # type: ignore[return-value]


@dataclass(frozen=True)
class MemoryRows:
    """An array in memory."""

    name: str
    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def read(self, ranges: Sequence[range]) -> list[np.ndarray]:
        """Return views of the wanted rows."""
        return [self.array[rows.start : rows.stop] for rows in ranges]


@dataclass(frozen=True)
class MappedRows:
    """An uncompressed array in a file, from byte ``offset`` on."""

    name: str
    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool = False

    def read(self, ranges: Sequence[range]) -> list[np.ndarray]:
        """Return the wanted rows as memory maps, copied only if stored by columns or off their alignment."""
        with reading(self.path):
            return [self._map(rows) for rows in ranges]

    def _map(self, rows: range) -> np.ndarray:
        if not rows:
            return np.empty((0, *self.shape[1:]), self.dtype)
        # Mode "c" (private pages) rather than "r": kernels see the same writable type as for arrays in memory
        # and are compiled once; the file cannot be changed through it.
        if self.fortran:
            whole = np.memmap(self.path, self.dtype, "c", self.offset, self.shape, order="F")
            return np.ascontiguousarray(whole[rows.start : rows.stop])
        start = self.offset + rows.start * prod(self.shape[1:]) * self.dtype.itemsize
        mapped = np.memmap(self.path, self.dtype, "c", start, (len(rows), *self.shape[1:]))
        return np.require(mapped.view(np.ndarray), requirements="A")


@dataclass(frozen=True)
class StreamedRows:
    """A compressed array: ``open()`` gives its plain bytes, of which the first ``skip`` are not rows."""

    name: str
    path: str
    open: Callable[[], IO[bytes]]
    skip: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, ranges: Sequence[range]) -> list[np.ndarray]:
        """Return copies of the wanted rows; all else is unpacked, checked by its checksum and dropped."""
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        arrays = [np.empty((len(rows), *self.shape[1:]), self.dtype) for rows in ranges]
        with reading(self.path), self.open() as stream:
            at = -self.skip
            for rows, array in zip(ranges, arrays, strict=True):
                self._drop(stream, rows.start * row_bytes - at)
                self._fill(stream, array)
                at = rows.stop * row_bytes
            self._drop(stream, self.shape[0] * row_bytes - at)
            if stream.read(1):
                raise self._wrong_length("more")
        return arrays

    def _drop(self, stream: IO[bytes], size: int) -> None:
        for _ in self._pieces(stream, size):
            pass

    def _fill(self, stream: IO[bytes], array: np.ndarray) -> None:
        flat, at = array.reshape(-1).view(np.uint8), 0
        for piece in self._pieces(stream, flat.size):
            flat[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)

    def _pieces(self, stream: IO[bytes], size: int) -> Iterator[bytes]:
        while size > 0:
            piece = stream.read(min(size, CHUNK_BYTES))
            if not piece:
                raise self._wrong_length("fewer")
            size -= len(piece)
            yield piece

    def _wrong_length(self, how: str) -> DataError:
        return DataError(
            f"{self.path}: unpacks to {how} bytes than the {self.shape[0]} rows of shape {self.shape[1:]} "
            f"that it promises; the file is damaged, fetch it again"
        )


def unpacked(array: RowArray) -> RowArray:
    """Return a compressed array in memory and any other as it is: for labels, small and read twice."""
    if isinstance(array, StreamedRows):
        return MemoryRows(array.name, array.read([range(array.shape[0])])[0])
    return array
