"""The rows of some shards in memory (or mapped), and the batches drawn from them.

Idea: a shard's rows are shuffled by a generator of its own every epoch, and a global batch takes the next few
rows of every shard (`mpiddl.layout.Layout`). So the rows of a step depend on the seed and on the number of
shards alone; ranks only divide them.

Cost: the rows are read once; a batch is one pass over its rows into a buffer that is used again; memory is
the rows themselves (none for mapped files), 24 bytes of indices a training row, and one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from mpiddl.data.row_scale import magnitude

from .. import kernels
from ..errors import ShapeError, UsageError
from ..layout import Layout
from ..memory import aligned_zeros, float_dtype
from .base import Rows, Source
from .runs import Run, read_runs


class ShardedRows:
    """The rows of the shards that a rank holds.

    Parameters
    ----------
    source : Source
        All rows; only those of ``shards`` are read, once, here.
    layout : Layout
        How the rows are cut, split and walked; ``layout.rows`` is ``source.n``.
    shards : sequence of int
        The shards held; none is fine and makes batches of no rows.
    seed : int
        The run's seed: the same on every rank.
    dtype : {"float32", "float64"}
        The model's.

    Attributes
    ----------
    shards : list of int
        The shards held, ascending.
    rows, train_rows, validation_rows : int
        Rows held here, and how many of them are trained on and held back.

    Raises
    ------
    ShapeError
        If source and layout disagree, or the source breaks its promise about shapes.
    PlacementError
        If a shard does not exist or is named twice.
    DataError
        If a row holds NaN, infinity, or a label out of range: on the ranks that hold it.

    Examples
    --------
    >>> from mpiddl.data import ArraySource
    >>> source = ArraySource(np.arange(12.0).reshape(6, 2), np.arange(6) % 2)
    >>> held = ShardedRows(source, Layout(rows=6, shards=3, batch=4), shards=[0, 1], seed=0, dtype="float32")
    >>> [held.batch(epoch=0, step=step)[0].shape for step in range(2)]
    [(3, 2), (1, 2)]
    """

    def __init__(
        self,
        source: Source,
        layout: Layout,
        shards: Sequence[int],
        seed: int = 0,
        dtype: DTypeLike = "float32",
    ):
        if layout.rows != source.n:
            raise ShapeError(f"layout: got {layout.rows} rows, expected {source.n}, the number of rows of the source")
        self.layout, self.shards, self.classes = layout, layout.check_shards(shards), source.classes
        self._dtype, self._features, self._targets = float_dtype(dtype), prod(source.shape), source.targets
        self._runs = read_runs(source, layout, self.shards, seed, self._dtype)
        self.rows = sum(len(run.x) for run in self._runs)
        self.bytes = any(run.scale != 1 for run in self._runs)  # uint8, which batches have scaled
        self.train_rows = sum(layout.train_count(shard) for shard in self.shards)
        self.validation_rows = self.rows - self.train_rows
        self._buffer = self._new_buffer(layout.max_batch_rows(self.shards))
        self._apart: list[Rows] = []
        self._epoch: int | None = None
        self._orders: list[tuple[Run, np.ndarray]] = []

    def batch(self, epoch: int, step: int) -> Rows:
        """Return this rank's rows of a global batch.

        Parameters
        ----------
        epoch, step : int
            Counted from 0; the step within the epoch.

        Returns
        -------
        x : (rows, features) of the model's dtype, C-contiguous, 64-byte aligned
            Features; uint8 is scaled by 1/255.
        y : int64 (rows,), or (rows,) or (rows, k) of the model's dtype
            Labels. Both arrays are overwritten by the next call; ``rows`` may be 0.

        Raises
        ------
        UsageError
            If there is no such step in an epoch; the same on every rank.
        """
        return _gather(self._buffer, self._taken(epoch, step))

    def batch_by_shard(self, epoch: int, step: int, parts: Sequence[Sequence[int]] | None = None) -> list[Rows]:
        """Return the rows of `batch` apart, shard by shard, or by sets of shards, ``parts``; some perhaps without rows.

        The arrays of a part have the same shapes, contents and alignment whoever holds it: what is computed from them has the
        same bits. They are overwritten by the next call, which has the same ``parts``. Other arguments and errors as `batch`.
        """
        parts = [[shard] for shard in self.shards] if parts is None else parts
        taken, picks = self._taken(epoch, step), {}
        for run, rows in taken:
            stop = 0
            for shard in run.shards:
                start, stop = stop, stop + len(self.layout.step_range(step, shard))
                picks[shard] = (run, rows[start:stop])
        if not self._apart:
            self._apart = [self._new_buffer(self.layout.max_batch_rows(part)) for part in parts]
        return [_gather(buffer, [picks[shard] for shard in part if shard in picks])
                for part, buffer in zip(parts, self._apart, strict=True)]

    def validation(self, chunk: int = 1024, by_shard: bool = False, shards: Sequence[int] | None = None) -> Iterator[Rows]:
        """Yield the rows held back from training, at most ``chunk`` at a time, as `batch` returns them.

        ``by_shard``: never of two shards at a time, so that the pieces do not depend on who holds what. ``shards``: only the
        rows of these.
        """
        wanted = self.shards if shards is None else shards
        by_run = [(run, [rows for shard, rows in zip(run.shards, run.held_back, strict=True) if shard in wanted])
                  for run in self._runs]
        if by_shard:
            return self._chunks([(run, rows) for run, each in by_run for rows in each], chunk)
        return self._chunks([(run, np.concatenate(each)) for run, each in by_run if each], chunk)

    def all_rows(self, chunk: int = 1024) -> Iterator[Rows]:
        """Yield every row held here, in order, as `validation` does: what a test set needs."""
        return self._chunks([(run, np.arange(len(run.x))) for run in self._runs], chunk)

    def shard_labels(self) -> list[np.ndarray]:
        """Return the labels of each shard held that has rows, as `mpiddl.data.sorted_warning` takes them."""
        return [labels for run in self._runs for labels in run.shard_labels()]

    def magnitude(self) -> float:
        """Return the largest number of all rows held here without its sign, as batches have it; no kernel is called."""
        return max((magnitude(run.x) * float(run.scale) for run in self._runs), default=0.0)

    def _taken(self, epoch: int, step: int) -> list[tuple[Run, np.ndarray]]:
        """The rows of a step, shard by shard, as indices into each run's."""
        if not 0 <= step < self.layout.steps_per_epoch:
            raise UsageError(f"step: got {step}, expected a step of the epoch, 0 to {self.layout.steps_per_epoch - 1}")
        if epoch != self._epoch:
            self._epoch, self._orders = epoch, [(run, run.order(epoch)) for run in self._runs]
        return [(run, order[run.starts[step] : run.starts[step + 1]]) for run, order in self._orders]

    def _chunks(self, picks: Sequence[tuple[Run, np.ndarray]], chunk: int) -> Iterator[Rows]:
        buffer = self._new_buffer(min(chunk, max((len(indices) for _, indices in picks), default=0)))
        for run, indices in picks:
            for start in range(0, len(indices), chunk):
                yield _gather(buffer, [(run, indices[start : start + chunk])])

    def _new_buffer(self, rows: int) -> Rows:
        x = aligned_zeros(rows * self._features, self._dtype).reshape(rows, self._features)
        kind = self._dtype if self.classes is None else np.dtype(np.int64)
        return x, aligned_zeros(rows * prod(self._targets), kind).reshape(rows, *self._targets)


def _gather(buffer: Rows, picks: Sequence[tuple[Run, np.ndarray]]) -> Rows:
    """Copy the picked rows of each run into the buffer, one run behind the other."""
    (x, y), stop = buffer, 0
    for run, indices in picks:
        start, stop = stop, stop + len(indices)
        kernels.gather_rows(run.x, indices, run.scale, x[start:stop])
        np.take(run.y, indices, axis=0, out=y[start:stop], mode="clip")  # "raise" copies through a buffer
    return x[:stop], y[:stop]
