"""What ``mpiddl evaluate`` and ``mpiddl predict`` do: a trained model applied to rows that the ranks share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mpiddl.data import Data, ShardedRows, Source, Task, open_data
from mpiddl.disk import writing
from mpiddl.errors import DataError, UsageError
from mpiddl.evaluation import evaluate_rows
from mpiddl.layout import Layout, block
from mpiddl.prediction import Trained, load, note_of_scale, outputs
from mpiddl.request import search_path
from mpiddl.row_scale import magnitude, scale_note
from mpiddl.transport.agree import agreed
from mpiddl.transport.mpi import connected

CHUNK = 4096  # rows a rank holds at once: 12 MiB of CIFAR-10 in float32


def evaluate_run(run: Path, data: str | None = None, comm: Any = None) -> dict[str, Any]:
    """Mean loss and accuracy of a trained model on test rows, the same on every rank.

    Parameters
    ----------
    run : Path
        A run's folder or a checkpoint.
    data : str, optional
        Name or folder of a data set; by default the one the model was trained on.

    Communication
    -------------
    Collective: one short all-gather and one all-reduce of 32 bytes.
    """
    with connected(comm, os.environ) as link:
        with agreed(link):
            trained = load(run)
            found = _open(trained, data)
            if found.test is None:
                raise DataError(f"data: {found.name} has no test rows; expected a set with some, or test_fraction above 0")
            rows = ShardedRows(found.test, Layout(found.test.n, link.size), [link.rank], 0, trained.job.dtype)
            largest = next((magnitude(x) for x, _ in rows.all_rows()), 0.0)
            note = scale_note(trained.about["data"], 255 * largest if rows.bytes else largest, rows.bytes)
        _say(link, note)
        result = evaluate_rows(link, trained.model, trained.params, rows.all_rows())
    return {"data": found.name, "rows": result.count, "loss": result.loss, "accuracy": result.accuracy,
            "step": trained.about["step"]}


def predict_run(run: Path, rows: str, output: Path, raw: bool = False, comm: Any = None) -> int:
    """Write the model's outputs for ``rows`` into ``output``, each rank its own rows; returns the number of rows.

    Parameters
    ----------
    run : Path
        A run's folder or a checkpoint.
    rows : str
        A .npy file of shape (n, features), or a data set, whose test rows are taken.
    output : Path
        The .npy file to write: int64 (n,) class numbers, or the outputs (n, k) if ``raw`` or there are no classes.
        It is written aside and renamed.

    Communication
    -------------
    Collective: three short all-gathers.
    """
    aside = output.with_name(f".writing-{output.name}") if output.name else output
    with connected(comm, os.environ) as link:
        with agreed(link):
            if output.is_dir() or not output.name:
                raise UsageError(f"output: got the folder {output}, expected the name of a .npy file to write")
            trained = load(run)
            inputs = _Inputs(trained, rows)
            pick = trained.about["data"]["classes"] is not None and not raw
        try:
            with agreed(link):
                if link.rank == 0:
                    _create(aside, (inputs.n,) if pick else (inputs.n, trained.about["data"]["outputs"]),
                            np.dtype(np.int64) if pick else trained.params.dtype)
            with agreed(link):
                note = _fill(aside, trained, inputs, block(inputs.n, link.size, link.rank), pick)
            _say(link, note)
            with agreed(link):
                if link.rank == 0:
                    aside.replace(output)
        finally:
            if link.rank == 0:
                aside.unlink(missing_ok=True)
    return inputs.n


class _Inputs:
    """Rows to predict for: of a .npy file, or of a data set's test source."""

    def __init__(self, trained: Trained, rows: str):
        self._array: np.ndarray | None = None
        self._source: Source | None = None
        if rows.endswith(".npy"):
            self._array = _map(rows)
            self.n = len(self._array)
        else:
            found = _open(trained, rows)
            self._source = found.test or found.train
            self.n = self._source.n

    def chunk(self, part: range) -> np.ndarray:
        if self._array is not None:
            return self._array[part.start : part.stop]
        assert self._source is not None
        return self._source.read([part])[0][0]


def _map(path: str) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UsageError(f"rows: {path}: {error.strerror or error}; expected a .npy file or a data set") from None
    except (ValueError, EOFError, OverflowError, MemoryError) as error:
        raise DataError(f"rows: {path}: damaged or not a .npy file of numbers ({error})") from None
    if not isinstance(array, np.ndarray):
        raise DataError(f"rows: {path}: got an archive of arrays, expected a .npy file with one")
    if array.ndim < 2 or array.dtype.kind not in "uif":
        raise DataError(f"rows: {path}: got {array.dtype} of shape {array.shape}, expected numbers of shape (n, features)")
    return array


def _open(trained: Trained, data: str | None) -> Data:
    name = data or trained.job.data
    if not data and trained.about["data"]["name"] == "arrays":
        raise UsageError("data: the model was trained on arrays of a program; name a data set with --data")
    task: Task = "classification" if trained.about["data"]["classes"] is not None else "regression"
    found = open_data(name, search_path(os.environ), task=task, test_fraction=trained.job.test_fraction)
    wanted = trained.about["data"]["features"]
    if found.features != wanted:
        raise DataError(f"data: {found.name} has {found.features} features, the model was trained on {wanted}")
    return found


def _create(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        np.lib.format.open_memmap(path, "w+", dtype, shape).flush()
        with open(path, "r+b") as file:  # a mapped page that finds no room on the disk would end the process
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def _fill(path: Path, trained: Trained, inputs: _Inputs, part: range, pick: bool) -> str:
    """Predict this rank's rows in chunks, into their place in the file; returns a note about their scale, or nothing."""
    if not part:
        return ""
    target, note, data = np.lib.format.open_memmap(path, "r+"), "", trained.about["data"]
    for start in range(part.start, part.stop, CHUNK):
        rows = range(start, min(start + CHUNK, part.stop))
        x = inputs.chunk(rows)
        note = note or note_of_scale(data, x)
        found = outputs(trained.model, trained.params.views, x, data["features"])
        target[rows.start : rows.stop] = found.argmax(axis=1) if pick else found
    target.flush()
    return note


def _say(link: Any, note: str) -> None:
    """Print one rank's note once, on standard error. Collective."""
    said = next(filter(None, link.allgather(note)), "")
    if said and link.rank == 0:
        print(said, file=sys.stderr, flush=True)
