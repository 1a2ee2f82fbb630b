"""What labels may be: class numbers 0..classes-1, strings that name classes, or the targets of a regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ..errors import DataError, UsageError
from .rows import MemoryRows, RowArray

Task = Literal["classification", "regression"]

FEW_LABELS = (
    32  # below this a handful of rows may skip class numbers; a byte that was damaged is mostly above it
)
AS_STRINGS = "Convert other labels to strings with y.astype(str)"
ROWS_TO_SEE_ALL = (
    10  # rows a class from which a set is expected to show every class: one in e^10 = 22,000 is missed
)


def task_of(labels: RowArray, task: Task | None) -> Task:
    """Return ``task``, or by default what the labels' dtype says: integers are classes, floats are targets.

    Raises
    ------
    UsageError
        If ``task`` is unknown; the same on every rank.
    DataError
        If the labels' dtype or number of dimensions does not fit the task; the same on every rank.
    """
    if task not in (None, "classification", "regression"):
        raise UsageError(f"task: got {task!r}, expected 'classification' or 'regression'")
    if labels.dtype.kind not in "biuf":
        raise DataError(f"{labels.name}: got labels of dtype {labels.dtype}, expected integers, floats or strings. "
                        f"{AS_STRINGS}")
    task = task or ("regression" if labels.dtype.kind == "f" else "classification")
    columns = labels.shape[1:]
    if task == "classification" and columns not in ((), (1,)):
        raise DataError(
            f"{labels.name}: got shape {labels.shape}, expected class numbers of shape (rows,). "
            f"Convert one-hot rows to class numbers with y.argmax(1)"
        )
    if len(columns) > 1:
        raise DataError(
            f"{labels.name}: got shape {labels.shape}, expected shape (rows,) or (rows, k) for regression"
        )
    return task


def shown_names(names: Sequence[str] | None) -> str:
    """Class names in a message: the first few of them."""
    if not names:
        return "class numbers or targets"
    return f"the {len(names)} labels {', '.join(map(repr, names[:5]))}" + ", ..." * (len(names) > 5)


def strings(labels: RowArray) -> np.ndarray | None:
    """Return all labels as an array of strings if they are strings, or bytes in UTF-8; otherwise None.

    Raises
    ------
    DataError
        If some are strings and others are not, or bytes are not UTF-8; the same on every rank.
    """
    if labels.dtype.kind not in "USOT":
        return None
    (found,) = labels.read([range(labels.shape[0])])
    values = [_decoded(labels.name, row, value) for row, value in enumerate(found.reshape(-1).tolist())]
    odd = [row for row, value in enumerate(values) if not isinstance(value, str)]
    if len(odd) == len(values):
        return None
    if odd:
        came = values[odd[0]]
        raise DataError(f"{labels.name}, row {odd[0]}: got label {came!r}, expected a string, as in other rows")
    return np.array(values).reshape(found.shape)


def _decoded(name: str, row: int, value: Any) -> Any:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise DataError(f"{name}, row {row}: got label {value!r}, expected UTF-8") from None


def numbered(labels: RowArray, names: Sequence[str] | None = None) -> tuple[tuple[str, ...] | None, RowArray]:
    """Return the class names and the labels as class numbers; ``(None, labels)`` if they are no strings.

    Parameters
    ----------
    labels : RowArray
        All labels.
    names : sequence of str, optional
        The class names, in the order of their numbers; by default the labels that occur, sorted.

    Raises
    ------
    DataError
        If a label is not among ``names``, or there are too many for classes; the same on every rank.
    """
    found = strings(labels)
    if found is None:
        if names:
            raise DataError(f"{labels.name}: got labels of dtype {labels.dtype}, expected {shown_names(names)}, as in training")
        return None, labels
    own, numbers = np.unique(found, return_inverse=True)
    numbers = numbers.reshape(found.shape)
    if names is None:
        names = tuple(own.tolist())
        if len(names) > max(FEW_LABELS, len(found) // 2):
            raise DataError(
                f"{labels.name}: got {len(names)} different strings in {len(found)} rows, expected labels that occur in "
                f"several rows. Convert numbers in strings with y.astype(float)"
            )
    else:
        place = {name: number for number, name in enumerate(names)}
        codes = np.array([place.get(name, -1) for name in own.tolist()])
        numbers = codes[numbers]
        _refuse(numbers.reshape(-1) >= 0, found.reshape(-1), labels.name, f"one of {shown_names(names)}")
    return tuple(names), MemoryRows(labels.name, numbers.astype(np.int64))


def class_numbers(labels: np.ndarray, name: str) -> np.ndarray:
    """Return labels (rows,) or (rows, 1) of any number type as int64 (rows,).

    Raises
    ------
    DataError
        If one is not a whole number; on the ranks that read it.
    """
    labels = labels.reshape(len(labels))
    if labels.dtype.kind == "f":
        _refuse(
            np.isfinite(labels) & (labels == np.floor(labels)),
            labels,
            name,
            "whole class numbers",
        )
    return labels.astype(np.int64, copy=False)


def check_labels(labels: np.ndarray, classes: int, name: str) -> None:
    """Refuse class numbers outside 0..classes-1.

    Raises
    ------
    DataError
        If one is; the message names the row and the label. On the ranks that read it.
    """
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        _refuse((labels >= 0) & (labels < classes), labels, name, f"0 to {classes - 1}")


def _refuse(fine: np.ndarray, labels: np.ndarray, name: str, wanted: str) -> None:
    """Raise for the first label that is not fine."""
    if not fine.all():
        row = int(np.argmin(fine))
        shown = repr(str(labels[row])) if labels.dtype.kind == "U" else labels[row]
        raise DataError(f"{name}, row {row}: got label {shown}, expected {wanted}")


def count_classes(labels: np.ndarray, name: str) -> int:
    """Return the number of classes: the largest label plus one.

    A damaged label must not pass for a class. So labels have to be plausible: no more classes than rows (or
    32), and, where there are as many rows as classes, at least half of the classes in use.

    Parameters
    ----------
    labels : int64 (rows,)
        All training labels, not only those of this rank.
    name : str
        Where they come from, for messages.

    Raises
    ------
    DataError
        If a label is negative or implausibly large; the same on every rank.
    """
    wanted = f"0 to classes-1, with no more classes than rows ({len(labels)}). {AS_STRINGS}"
    _refuse((labels >= 0) & (labels < max(len(labels), FEW_LABELS)), labels, name, wanted)
    classes = int(labels.max()) + 1
    used = np.count_nonzero(np.bincount(labels))
    if 2 * used < classes <= len(labels):
        raise DataError(
            f"{name}, row {np.argmax(labels)}: got label {classes - 1}, but only {used} different labels occur, "
            f"expected labels from 0 to classes-1 without such gaps. {AS_STRINGS}"
        )
    return classes


def sorted_warning(labels: Sequence[np.ndarray], classes: int | None) -> str | None:
    """Return a sentence if shards miss most classes, as they do when a file is sorted by label; else None.

    Parameters
    ----------
    labels : sequence of int64 (rows,)
        The labels of each shard that this rank holds.
    classes : int or None
        Number of classes; None (regression) never warns.
    """
    # Eight rows a class: balanced, shuffled rows then miss half of the classes with a chance below 1e-4.
    counts = [
        len(np.unique(shard)) for shard in labels if classes and classes > 1 and len(shard) >= 8 * classes
    ]
    poor = [count for count in counts if 2 * count <= classes]  # type: ignore[operator]
    if not poor:
        return None
    return (
        f"{len(poor)} of the {len(labels)} shards here hold at most half of the {classes} classes (one holds "
        f"{min(poor)}), as in a file sorted by label: strategies that train locally suffer; "
        f"shuffle the rows of the file once"
    )
