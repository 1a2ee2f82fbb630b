"""Arrays as a source: a user's own, and every format that holds one array of rows and one of labels."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError, UsageError
from .base import Data, Rows
from .hold_out import TEST_FRACTION, hold_out
from .labels import ROWS_TO_SEE_ALL, Task, check_labels, class_numbers, count_classes, numbered, task_of
from .rows import MemoryRows, RowArray


class ArraySource:
    """Rows from an array of features and an array of labels.

    Parameters
    ----------
    x : array (rows, ...) or RowArray
        Features of any integer, boolean or real type. uint8 stays what it is and is scaled by 1/255 into a
        batch; float32 and float64 stay as well; other types are converted when their rows are read. Arrays of
        the right type are not copied.
    y : array (rows,), (rows, 1) or (rows, k), or RowArray
        Class numbers 0..classes-1, strings that name classes, or the targets of a regression. Strings are numbered
        in sorted order.
    classes : int, optional
        Number of classes, by default the largest label plus one.
    task : {"classification", "regression"}, optional
        By default classification for integer labels and strings, and regression for floats.
    class_names : sequence of str, optional
        The strings that labels may be, in the order of their class numbers; by default those that occur.

    Raises
    ------
    DataError
        If the arrays do not fit together, hold no rows, or labels are out of range; on every rank that holds
        them.
    UsageError
        If ``task`` or ``classes`` cannot be taken.

    Examples
    --------
    >>> source = ArraySource(np.zeros((6, 2, 2), np.float32), np.array([0, 1, 2, 0, 1, 2]))
    >>> source.n, source.shape, source.classes
    (6, (2, 2), 3)
    """

    def __init__(
        self,
        x: ArrayLike | RowArray,
        y: ArrayLike | RowArray,
        *,
        classes: int | None = None,
        task: Task | None = None,
        class_names: Sequence[str] | None = None,
    ):
        self._x, self._y = as_rows(x, "x"), as_rows(y, "y")
        check_pair(self._x, self._y)
        self.class_names, self._y = numbered(self._y, class_names)
        if self.class_names:
            classes = len(self.class_names)
            if task == "regression":
                raise DataError(f"{self._y.name}: got strings, expected numbers, because the task is regression")
        self.task = task_of(self._y, task)
        self.n = self._x.shape[0]
        self.shape = self._x.shape[1:]
        if self.task == "regression":
            self.classes, self.targets = None, self._y.shape[1:]
        else:
            self.classes, self.targets = self._count_classes(classes), ()
        self._dtype = feature_dtype(self._x)

    def labels(self) -> np.ndarray:
        """Return all labels as class numbers, int64 (rows,)."""
        (labels,) = self._y.read([range(self.n)])
        return class_numbers(labels, self._y.name)

    def read(self, ranges: Sequence[range]) -> list[Rows]:
        """Return ``(x, y)`` of ascending, disjoint ranges: views of memory or mapped files if possible."""
        return [
            (self._features(x), self._labels(y))
            for x, y in zip(self._x.read(ranges), self._y.read(ranges), strict=True)
        ]

    def where(self, row: int) -> str:
        """Return the name of the features' array and the row in it."""
        return f"{self._x.name}, row {row}"

    def where_label(self, row: int) -> str:
        """Return the name of the labels' array and the row in it."""
        return f"{self._y.name}, row {row}"

    def _count_classes(self, classes: int | None) -> int:
        labels = self.labels()
        if classes is None:
            return count_classes(labels, self._y.name)
        if classes < 1:
            raise UsageError(f"classes: got {classes}, expected 1 or more")
        check_labels(labels, classes, self._y.name)
        return classes

    def _features(self, x: np.ndarray) -> np.ndarray:
        # Kernels want rows that are contiguous and aligned: files and users' slices need not be.
        x = np.require(x, self._dtype, requirements=("C", "A"))
        return x.reshape(len(x), prod(self.shape))

    def _labels(self, y: np.ndarray) -> np.ndarray:
        if self.task == "classification":
            return class_numbers(y, self._y.name)
        return y if y.dtype in (np.float32, np.float64) else y.astype(np.float64)


def as_rows(array: ArrayLike | RowArray, name: str) -> RowArray:
    """Return what numpy takes for an array as an array of rows; what is read by ranges stays itself."""
    if hasattr(array, "read"):
        return array  # type: ignore[return-value]
    return MemoryRows(name, dense(array, name))


def dense(array: ArrayLike, name: str) -> np.ndarray:
    """Return what numpy takes for an array as one.

    Raises
    ------
    DataError
        If it is sparse, has masked entries, or is no array at all; the same on every rank that was given the same.
    """
    kind = type(array).__name__
    if hasattr(array, "toarray"):
        raise DataError(f"{name}: got a sparse matrix ({kind}), expected a dense array: {name}.toarray()")
    refuse_masked(array, name)
    try:
        found = np.asarray(array)
    except (ValueError, TypeError, RuntimeError) as error:  # lists of several lengths; tensors that ask for a gradient
        raise DataError(f"{name}: got {kind}, expected an array ({error})") from error
    if not found.ndim:
        raise DataError(f"{name}: got {kind}, expected an array with one entry for each row")
    return found


def refuse_masked(array: Any, name: str) -> None:
    """Raise a `DataError` if an array, or one in a list, has masked entries: numpy would read the values behind the mask."""
    parts = array if isinstance(array, (list, tuple)) else [array]
    hidden = sum(int(part.mask.sum()) for part in parts if isinstance(part, np.ma.MaskedArray))
    if hidden:
        raise DataError(f"{name}: got a masked array (masked entries: {hidden}), expected no masked entries; fill them "
                        "in, or leave out their rows or columns")


def check_pair(x: RowArray, y: RowArray) -> None:
    """Refuse features and labels whose shapes do not fit together.

    Raises
    ------
    DataError
        If dimensions are missing, there are no rows or no features, or the numbers of rows disagree.
    """
    if len(x.shape) < 2 or min(x.shape[1:]) < 1:
        raise DataError(
            f"{x.name}: got shape {x.shape}, expected (rows, features) or (rows, height, width, ...)"
        )
    if not y.shape:
        raise DataError(f"{y.name}: got a single number, expected one label for each row")
    if x.shape[0] != y.shape[0]:
        raise DataError(
            f"{y.name}: got {y.shape[0]} labels, expected {x.shape[0]}, one label for each row of {x.name}"
        )
    if x.shape[0] < 1:
        raise DataError(f"{x.name}: got shape {x.shape}, expected at least one row")


def feature_dtype(x: RowArray) -> np.dtype:
    """Return the type that features are read as: uint8, float32 or float64, the smallest that holds them.

    Raises
    ------
    DataError
        If ``x`` holds no real numbers.
    """
    if x.dtype.kind not in "biuf":
        raise DataError(f"{x.name}: got features of dtype {x.dtype}, expected integers or real numbers")
    if x.dtype == np.uint8:
        return np.dtype(np.uint8)
    return np.dtype(np.float64 if np.result_type(x.dtype, np.float32).itemsize > 4 else np.float32)


def arrays_data(
    x: ArrayLike | RowArray,
    y: ArrayLike | RowArray,
    x_test: ArrayLike | RowArray | None = None,
    y_test: ArrayLike | RowArray | None = None,
    *,
    name: str = "arrays",
    classes: int | None = None,
    task: Task | None = None,
    test_fraction: float = TEST_FRACTION,
    class_names: Sequence[str] | None = None,
) -> Data:
    """Return a data set made of arrays, with a part held out for testing if no test arrays are given.

    Parameters
    ----------
    x, y : array or RowArray
        Features and labels to train on, as for `ArraySource`.
    x_test, y_test : array or RowArray, optional
        Features and labels to test on, of the same row shape.
    name : str
        What reports call it.
    classes, task, class_names
        As for `ArraySource`; by default the number of classes is taken from all training labels.
    test_fraction : float
        Fraction of the rows held out for testing if there are no test arrays; 0 for none.

    Raises
    ------
    DataError
        If arrays do not fit together or labels are out of range.
    UsageError
        If an argument cannot be taken, or only one of ``x_test`` and ``y_test`` is given.
    """
    if (x_test is None) != (y_test is None):
        raise UsageError("x_test and y_test: got only one of these arrays, expected both or neither")
    train = ArraySource(x, y, classes=classes, task=task, class_names=class_names)
    if x_test is None or y_test is None:
        kept, held_out = hold_out(train, test_fraction)
        return Data(name, kept, held_out, train.classes, prod(train.shape), train.class_names)
    x_test, y_test = as_rows(x_test, "x_test"), as_rows(y_test, "y_test")
    if classes is None and train.classes and not train.class_names and train.n < ROWS_TO_SEE_ALL * train.classes:
        # Too few rows to show every class: the test labels have a say as well.
        seen = ArraySource(x_test, y_test, task=train.task).classes
        train = ArraySource(x, y, classes=max(train.classes, seen or 0), task=train.task)
    test = ArraySource(x_test, y_test, classes=train.classes, task=train.task, class_names=train.class_names)
    if test.class_names != train.class_names:
        raise DataError(f"{y_test.name}: got strings, expected class numbers, as in training")
    for what in ("shape", "targets"):
        if getattr(train, what) != getattr(test, what):
            raise DataError(
                f"{test.where(0)}: got {what} {getattr(test, what)}, expected {getattr(train, what)}, as in training"
            )
    return Data(name, train, test, train.classes, prod(train.shape), train.class_names)
