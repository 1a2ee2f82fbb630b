"""CIFAR-10 in binary: ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, plain or gzip.

A record is one label byte and 3,072 pixels: the red, green and blue planes of a 32x32 image.
https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..errors import DataError, UsageError
from .base import Data, Rows
from .hold_out import TEST_FRACTION, hold_out
from .labels import Task
from .rows import MappedRows, RowArray, StreamedRows, is_gzip, open_bytes, reading

PIXELS = 3072
RECORD = 1 + PIXELS
WANTED = "data_batch_1.bin[.gz] to data_batch_5.bin[.gz] (CIFAR-10 binary)"


class Cifar10Source:
    """The records of some batch files, one file after the other.

    Parameters
    ----------
    files : sequence of Path
        Batch files, plain or gzip.

    Raises
    ------
    DataError
        If a file cannot be read or is no whole number of records.
    """

    shape: tuple[int, ...] = (3, 32, 32)
    classes: int | None = 10
    targets: tuple[int, ...] = ()

    def __init__(self, files: Sequence[Path]):
        self._files = [_open(path) for path in files]
        self._starts = np.cumsum([0] + [file.shape[0] for file in self._files])
        self.n = int(self._starts[-1])

    def read(self, ranges: Sequence[range]) -> list[Rows]:
        """Return copies of the wanted rows: pixels uint8 (rows, 3072) and labels int64 (rows,)."""
        arrays = [(np.empty((len(rows), PIXELS), np.uint8), np.empty(len(rows), np.int64)) for rows in ranges]
        for file, start in zip(self._files, self._starts[:-1].tolist(), strict=True):
            parts = list(_overlaps(ranges, range(start, start + file.shape[0])))
            records = file.read([range(rows.start - start, rows.stop - start) for _, rows in parts])
            for (number, rows), record in zip(parts, records, strict=True):
                at = slice(rows.start - ranges[number].start, rows.stop - ranges[number].start)
                x, y = arrays[number]
                x[at], y[at] = record[:, 1:], record[:, 0]
        return arrays

    def where(self, row: int) -> str:
        """Return the batch file and the record in it."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return f"{self._files[number].name}, row {row - self._starts[number]}"


def matches(folder: Path) -> bool:
    """Return whether a folder holds training batches of this format."""
    return bool(_batches(folder))


def cifar_data(folder: Path, task: Task | None = None, test_fraction: float = TEST_FRACTION) -> Data:
    """Open a folder with any of the five batches; without ``test_batch.bin`` a part is held out for testing.

    Raises
    ------
    DataError
        If a file is damaged.
    UsageError
        If a regression is wanted.
    """
    if task == "regression":
        raise UsageError("task: got 'regression', expected 'classification' for CIFAR-10")
    train = Cifar10Source(_batches(folder))
    test_file = _find(folder, "test_batch.bin")
    if test_file is None:
        kept, test = hold_out(train, test_fraction)
        return Data(folder.name, kept, test, 10, PIXELS)
    return Data(folder.name, train, Cifar10Source([test_file]), 10, PIXELS)


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)


def _batches(folder: Path) -> list[Path]:
    found = [_find(folder, f"data_batch_{number}.bin") for number in range(1, 6)]
    return [path for path in found if path is not None]


def _open(path: Path) -> RowArray:
    """Return a file as an array of records."""
    packed = is_gzip(path)
    size = _unpacked_size(path) if packed else os.path.getsize(path)
    if size == 0 or size % RECORD:
        raise DataError(
            f"{path}: got {size} bytes{' after decompression' * packed}, expected a multiple of {RECORD} bytes (1 label and "
            f"{PIXELS} pixels). The file is truncated, or is not a CIFAR-10 binary batch"
        )
    shape, kind = (size // RECORD, RECORD), np.dtype(np.uint8)
    if packed:
        return StreamedRows(str(path), str(path), lambda: open_bytes(path), 0, shape, kind)
    return MappedRows(str(path), str(path), 0, shape, kind)


def _unpacked_size(path: Path) -> int:
    """Return the size that the last four bytes of a gzip file promise (RFC 1952); a read checks it."""
    with reading(path), open(path, "rb") as file:
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(4), "little")


def _overlaps(ranges: Sequence[range], rows: range) -> Iterator[tuple[int, range]]:
    """Yield the number of each range that meets ``rows``, and where it does."""
    for number, wanted in enumerate(ranges):
        common = range(max(wanted.start, rows.start), min(wanted.stop, rows.stop))
        if common:
            yield number, common
