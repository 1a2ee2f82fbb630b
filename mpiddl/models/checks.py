"""Checks of what reaches a model; each costs a few comparisons and copies nothing that fits already."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mpiddl.errors import ShapeError, UsageError


def one_of(argument: str, value: object, wanted: Iterable[str]) -> None:
    """Refuse `value` unless it is one of the words `wanted`."""
    words = tuple(wanted)
    if value not in words:
        raise UsageError(f"{argument}: got {value!r}, expected one of {', '.join(map(repr, words))}")


def check_width(x: np.ndarray, inputs: int) -> None:
    """Refuse `x` unless it is rows of `inputs` numbers."""
    if x.ndim != 2 or x.shape[1] != inputs:
        raise ShapeError(f"x: got shape {x.shape}, expected (rows, {inputs})")


def same_rows(x: np.ndarray, y: np.ndarray) -> None:
    """Refuse `y` unless it has as many rows as `x`."""
    if len(x) != len(y):
        raise ShapeError(f"y: got {len(y)} rows, expected {len(x)}, the number of rows of x")


def rows_of(x: np.ndarray, inputs: int, dtype: np.dtype) -> np.ndarray:
    """`x` as contiguous, writeable rows of `inputs` numbers of that dtype."""
    check_width(x, inputs)
    if x.dtype.kind != "f":
        raise ShapeError(f"x: got {x.dtype}, expected {dtype}; convert bytes with x.astype('{dtype}') / 255")
    return _plain(x, dtype)


def labels_of(y: np.ndarray, rows: int) -> np.ndarray:
    """`y` as int64 labels, one a row."""
    if y.shape != (rows,) or y.dtype.kind not in "iu":
        raise ShapeError(f"y: got {y.dtype} of shape {y.shape}, expected integers of shape ({rows},)")
    return _plain(y, np.dtype(np.int64))


def targets_of(y: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """`y` as targets of the shape and dtype of `outputs`; one column may come flat."""
    if y.shape != outputs.shape and y.shape != outputs.shape[: 1 if outputs.shape[1] == 1 else 2]:
        raise ShapeError(f"y: got shape {y.shape}, expected {outputs.shape}, the shape of the outputs")
    return _plain(y, outputs.dtype).reshape(outputs.shape)


def _plain(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` itself if it is contiguous, writeable and of that dtype, else a copy that is.

    Kernels write to none of these, but numba would compile them once more for arrays that are read-only.
    """
    if array.dtype == dtype and array.flags.c_contiguous and array.flags.writeable:
        return array
    return np.array(array, dtype, order="C")
