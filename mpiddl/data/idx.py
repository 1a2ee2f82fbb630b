"""The format of MNIST and Fashion-MNIST: ``train-images-idx3-ubyte`` and its three companions, gzip or plain.

A file is a magic number, one big-endian count a dimension, and the bytes:
https://github.com/zalandoresearch/fashion-mnist.
"""

from __future__ import annotations

import os
import struct
from math import prod
from pathlib import Path

import numpy as np

from ..errors import DataError
from .arrays import arrays_data
from .base import Data
from .hold_out import TEST_FRACTION
from .labels import Task
from .rows import MappedRows, RowArray, StreamedRows, is_gzip, open_bytes, reading, unpacked

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
DEFLATE_RATIO = 1032  # the most that gzip can pack: 258 bytes in two bits (RFC 1951)
WANTED = f"{FILES[0]}[.gz] and {FILES[1]}[.gz] (MNIST)"


def matches(folder: Path) -> bool:
    """Return whether a folder holds training images of this format."""
    return _find(folder, FILES[0]) is not None


def idx_data(folder: Path, task: Task | None = None, test_fraction: float = TEST_FRACTION) -> Data:
    """Open a folder of idx files; without ``t10k`` files a part of the training rows is held out for testing.

    Raises
    ------
    DataError
        If a file is missing, damaged or not what its name says.
    """
    images, labels = _images(folder, FILES[0]), _labels(folder, FILES[1])
    if _find(folder, FILES[2]) is None:
        return arrays_data(images, labels, name=folder.name, task=task, test_fraction=test_fraction)
    test = _images(folder, FILES[2]), _labels(folder, FILES[3])
    return arrays_data(images, labels, *test, name=folder.name, task=task)


def _find(folder: Path, name: str) -> Path | None:
    """Return the file of that name, in the two spellings in use, gzip or plain."""
    spellings = (name, name.replace("-idx", ".idx"))
    candidates = [folder / (spelling + end) for end in ("", ".gz") for spelling in spellings]
    return next((path for path in candidates if path.exists()), None)


def _images(folder: Path, name: str) -> RowArray:
    return _open(_need(folder, name), 3)


def _labels(folder: Path, name: str) -> RowArray:
    return unpacked(_open(_need(folder, name), 1))


def _need(folder: Path, name: str) -> Path:
    path = _find(folder, name)
    if path is None:
        raise DataError(f"{folder}: the file {name}[.gz] is missing, expected this file beside the other MNIST files")
    return path


def open_idx(path: Path) -> RowArray:
    """Return an idx file of unsigned bytes, whatever its dimensions, as an array of rows, with only the header read."""
    with reading(path), open_bytes(path) as file:
        magic = file.read(4)
    return _open(path, magic[3] if len(magic) == 4 else 1)


def _open(path: Path, dimensions: int) -> RowArray:
    """Return the bytes of an idx file as an array of rows, with only the header read."""
    shape = _header(path, dimensions)
    skip, kind = 4 + 4 * dimensions, np.dtype(np.uint8)
    wanted, size, packed = skip + prod(shape), os.path.getsize(path), is_gzip(path)
    # Checked before memory is asked for; the exact length of what is packed shows only in reading.
    if wanted > DEFLATE_RATIO * size if packed else wanted != size:
        raise DataError(
            f"{path}: got {size} bytes, expected {wanted} bytes for the shape {shape} in its header"
        )
    if packed:
        return StreamedRows(str(path), str(path), lambda: open_bytes(path), skip, shape, kind)
    return MappedRows(str(path), str(path), skip, shape, kind)


def _header(path: Path, dimensions: int) -> tuple[int, ...]:
    """Return the shape that the header of a file of unsigned bytes names."""
    size = 4 + 4 * dimensions
    with reading(path), open_bytes(path) as file:
        header = file.read(size)
    if len(header) < size:
        raise DataError(f"{path}: got {len(header)} bytes, expected a header of {size} bytes")
    magic, *shape = struct.unpack(f">{1 + dimensions}I", header)
    if magic != 0x800 + dimensions:  # 0x08 says unsigned bytes, the last byte counts the dimensions
        raise DataError(
            f"{path}: got the magic number {magic:#010x}, expected {0x800 + dimensions:#010x} "
            f"(an idx file of unsigned bytes with {dimensions} dimension{'s' * (dimensions > 1)})"
        )
    return tuple(shape)
