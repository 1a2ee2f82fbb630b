"""What a data set is: a `Source`, rows read by ranges, and `Data`, one to train on and one to test on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

import numpy as np

Rows = tuple[np.ndarray, np.ndarray]


@runtime_checkable
class Source(Protocol):
    """Rows and their labels, read by contiguous ranges. Write your own to feed a format that is not here.

    Attributes
    ----------
    n : int
        Rows.
    shape : tuple of int
        Shape of one row's features; in a batch they are flattened.
    classes : int or None
        Labels are 0..classes-1; None for regression.
    targets : tuple of int
        Shape of one row's label: ``()``, or ``(k,)`` for a regression with k outputs.
    """

    @property
    def n(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def classes(self) -> int | None: ...

    @property
    def targets(self) -> tuple[int, ...]: ...

    def read(self, ranges: Sequence[range]) -> list[Rows]:
        """Return ``(x, y)`` for each of the ascending, disjoint ``ranges`` of rows, and read no others.

        ``x`` is (rows, features) uint8, float32 or float64, C-contiguous; ``y`` is int64 (rows,), or float
        for a regression.
        """
        ...

    def where(self, row: int) -> str:
        """Return where a row comes from, for messages: the file and the row in it."""
        ...

    # Optional: `where_label`, the same of a row's label, if labels have a file of their own.


def label_place(source: Source) -> Callable[[int], str]:
    """Return what tells where the label of a row comes from."""
    return getattr(source, "where_label", source.where)


@dataclass(frozen=True)
class Data:
    """A data set that was found and opened: nothing but headers and labels has been read yet.

    Attributes
    ----------
    name : str
        What it is called in reports.
    train : Source
        The rows to train on.
    test : Source or None
        The rows to test on, None if there is only one row in all.
    classes : int or None
        Number of classes, None for regression.
    features : int
        Columns of a batch.
    class_names : tuple of str or None
        What the classes are called, where labels were strings.
    outputs : int
        Columns a model puts out: the classes, or the columns of a regression's targets.
    """

    name: str
    train: Source
    test: Source | None
    classes: int | None
    features: int
    class_names: tuple[str, ...] | None = None

    @property
    def outputs(self) -> int:
        """Columns a model puts out: the classes, or the columns of a regression's targets."""
        return self.classes if self.classes is not None else prod(self.train.targets)
