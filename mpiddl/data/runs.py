"""A run of neighbouring shards: its rows, read and checked at once, and the order in which they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from ..errors import DataError, ShapeError
from ..layout import Layout
from .base import Rows, Source, label_place
from .draws import SHUFFLE, SPLIT, permutation

FEATURES = (np.uint8, np.float32, np.float64)
CHECK_BYTES = 1 << 20  # rows are checked in pieces that stay in the cache


class Run:
    """The rows of neighbouring shards.

    Attributes
    ----------
    x : uint8, float32 or float64 (rows, features)
        Features as the source gave them.
    y : int64 (rows,), or (rows,) or (rows, k) of the model's dtype
        Labels.
    scale : float32 or float64
        What features are multiplied by on their way into a batch: 1/255 for bytes.
    starts : int64 (steps + 1,)
        The rows of step t are ``order(epoch)[starts[t]:starts[t + 1]]``.
    shards : sequence of int
        Which they are, ascending.
    held_back : list of int64 (n,)
        The rows of each shard for validation, ascending.
    """

    def __init__(self, rows: Rows, layout: Layout, shards: Sequence[int], seed: int, dtype: np.dtype):
        self.x, y = rows
        self.y = y if y.dtype == np.int64 else y.astype(dtype, copy=False)
        self.scale = dtype.type(1 / 255 if self.x.dtype == np.uint8 else 1)
        self.shards, self._seed = shards, seed
        first = layout.shard_rows(shards[0]).start
        self._spans = [
            range(span.start - first, span.stop - first) for span in map(layout.shard_rows, shards)
        ]
        self._drawn, self.held_back = self._split(layout)
        self._slots, self.starts = _walk(layout, shards)

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows to train on in the order in which the steps of an epoch take them, int64."""
        shuffled = [
            rows[permutation(len(rows), self._seed, SHUFFLE, shard, epoch)]
            for shard, rows in zip(self.shards, self._drawn, strict=True)
        ]
        return np.concatenate(shuffled)[self._slots]

    def shard_labels(self) -> list[np.ndarray]:
        """Return views of each shard's labels."""
        return [self.y[span.start : span.stop] for span in self._spans]

    def _split(self, layout: Layout) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return each shard's rows to train on and for validation: random ones, as files may be sorted."""
        drawn, held_back = [], []
        for shard, span in zip(self.shards, self._spans, strict=True):
            count = layout.train_count(shard)
            mixed = span.start + permutation(len(span), self._seed, SPLIT, shard)
            drawn.append(np.sort(mixed[:count]))
            held_back.append(np.sort(mixed[count:]))
        return drawn, held_back


def read_runs(source: Source, layout: Layout, shards: Sequence[int], seed: int, dtype: np.dtype) -> list[Run]:
    """Read the rows of ``shards`` (ascending), neighbouring ones as one range, and check them.

    Raises
    ------
    ShapeError
        If the source does not return what it promises.
    DataError
        If a value is not finite in ``dtype`` or a label is out of range; the message says in which row of
        which file.
    """
    runs = [run for run in _neighbours(shards) if _rows(layout, run)]
    ranges = [_rows(layout, run) for run in runs]
    read = source.read(ranges)
    for rows, (x, y) in zip(ranges, read, strict=True):
        _check_shapes(source, rows, x, y)
        _check_finite(source.where, rows, x, dtype)
        if source.classes is None:
            _check_finite(label_place(source), rows, y, dtype)
        else:
            _check_labels(source, rows, y, source.classes)
    return [Run(rows, layout, run, seed, dtype) for rows, run in zip(read, runs, strict=True)]


def _neighbours(shards: Sequence[int]) -> list[list[int]]:
    """Return ascending shards cut wherever a number is left out."""
    runs: list[list[int]] = []
    for shard in shards:
        if runs and runs[-1][-1] == shard - 1:
            runs[-1].append(shard)
        else:
            runs.append([shard])
    return runs


def _rows(layout: Layout, run: Sequence[int]) -> range:
    """Return the rows of a run."""
    return range(layout.shard_rows(run[0]).start, layout.shard_rows(run[-1]).stop)


def _walk(layout: Layout, shards: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return in which order steps take the shards' rows, laid end to end, and where each step starts."""
    positions = [shard + layout.shards * np.arange(layout.train_count(shard)) for shard in shards]
    steps = np.concatenate(positions) // layout.batch
    # Stable: within a step shard by shard, so that memory is walked forwards.
    slots = np.argsort(steps, kind="stable")
    return slots, np.searchsorted(steps[slots], np.arange(layout.steps_per_epoch + 1))


def _check_shapes(source: Source, rows: range, x: np.ndarray, y: np.ndarray) -> None:
    """Refuse arrays that are not what the source promises: users write sources."""
    wanted = (len(rows), prod(source.shape)), (len(rows), *source.targets)
    kinds = (np.float32, np.float64) if source.classes is None else (np.int64,)
    if (x.shape, y.shape) != wanted or x.dtype not in FEATURES or y.dtype not in kinds:
        raise ShapeError(
            f"{source.where(rows.start)}: read() returned x of {x.dtype} and shape {x.shape}, y of {y.dtype} and shape "
            f"{y.shape}; expected x of {_names(FEATURES)} and shape {wanted[0]}, y of {_names(kinds)} and shape {wanted[1]}"
        )


def _names(kinds: Sequence[type]) -> str:
    return " or ".join(np.dtype(kind).name for kind in kinds)


def _check_finite(where: Callable[[int], str], rows: range, values: np.ndarray, dtype: np.dtype) -> None:
    """Refuse NaN, infinity and what overflows to infinity in ``dtype``."""
    if values.dtype == np.uint8:
        return
    height = max(1, CHECK_BYTES // max(1, values[:1].nbytes))
    for start in range(0, len(values), height):
        with np.errstate(over="ignore"):
            fine = np.isfinite(values[start : start + height].astype(dtype, copy=False))
        if not fine.all():
            row, *column = np.argwhere(~fine)[0].tolist()
            place = where(rows[start + row]) + "".join(f", column {number}" for number in column)
            got = values[(start + row, *column)]
            raise DataError(f"{place}: got {got}, expected a number that is finite in {dtype}")


def _check_labels(source: Source, rows: range, labels: np.ndarray, classes: int) -> None:
    """Refuse class numbers out of range."""
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if bad.size:
        where = label_place(source)(rows[int(bad[0])])
        raise DataError(f"{where}: got label {labels[bad[0]]}, expected 0 to {classes - 1}")
