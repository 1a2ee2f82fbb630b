"""What ``mpiddl evaluate`` and ``mpiddl predict`` do: a trained model applied to rows that the ranks share."""

from __future__ import annotations

import os
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpiddl.data import Data, ShardedRows, Source, Task, open_data, shown_names
from mpiddl.data.row_scale import magnitude, scale_note
from mpiddl.errors import DataError, ShapeError, UsageError
from mpiddl.layout import Layout, block
from mpiddl.machine.disk import writing
from mpiddl.training.evaluation import evaluate_rows
from mpiddl.training.prediction import Trained, class_numbers, load_with, note_of_scale, outputs, predictions
from mpiddl.training.request import search_path
from mpiddl.transport.agree import agreed
from mpiddl.transport.comm import AnyComm, Comm
from mpiddl.transport.mpi import connected
from mpiddl.transport.uncaught import public

CHUNK = 4096  # rows a rank holds at once: 12 MiB of CIFAR-10 in float32


@public
def evaluate_run(run: Path, data: str | None = None, comm: AnyComm | None = None, model: Any = None) -> dict[str, Any]:
    """Mean loss and accuracy of a trained model on test rows, the same on every rank.

    Parameters
    ----------
    run : Path
        A run's folder or a checkpoint.
    data : str, optional
        Name or folder of a data set; by default the one the model was trained on.
    model : Model or str, optional
        As for `mpiddl.load`: the model that was trained, if it is a user's own.

    Communication
    -------------
    Collective: one short all-gather and one all-reduce of 32 bytes.
    """
    with connected(comm, os.environ) as link:
        with agreed(link):
            trained = load_with(run, model, by_name=True)
            found = _open(trained, data)
            if found.test is None:
                raise DataError(f"data: the data set {found.name} has no test rows, expected a data set with test rows")
            rows = ShardedRows(found.test, Layout(found.test.n, link.size), [link.rank], 0, trained.job.dtype)
            largest = next((magnitude(x) for x, _ in rows.all_rows()), 0.0)
            note = scale_note(trained.about["data"], 255 * largest if rows.bytes else largest, rows.bytes)
        _say(link, note)
        result = evaluate_rows(link, trained.model, trained.params, rows.all_rows())
    return {"data": found.name, "rows": result.count, "loss": result.loss, "accuracy": result.accuracy,
            "step": trained.about["step"]}


@public
def predict_run(run: Path, rows: str, output: Path, raw: bool = False, comm: AnyComm | None = None, model: Any = None) -> int:
    """Write what the model says of ``rows`` into ``output``, each rank its own rows; returns the number of rows.

    Parameters
    ----------
    run : Path
        A run's folder or a checkpoint.
    rows : str
        A .npy file of shape (n, features), or a data set, whose test rows are taken.
    output : Path
        The .npy file to write, aside and renamed: int64 (n,) class numbers, or strings (n,) where labels were strings; of a
        regression, numbers (n,) or (n, k) as its targets were.
    raw : bool
        Write the model's outputs as it computes them instead.
    model : Model or str, optional
        As for `mpiddl.load`: the model that was trained, if it is a user's own.

    Communication
    -------------
    Collective: three short all-gathers.
    """
    aside = output.with_name(f".writing-{output.name}") if output.name else output
    with connected(comm, os.environ) as link:
        with agreed(link):
            if output.is_dir() or not output.name:
                raise UsageError(f"output: got the folder {output}, expected the name of a .npy file to write")
            trained = load_with(run, model, by_name=True)
            inputs = _Inputs(trained, rows)
        try:
            with agreed(link):
                if link.rank == 0:
                    first = _answers(trained, inputs.chunk(range(min(1, inputs.n))), raw)
                    _create(aside, (inputs.n, *first.shape[1:]), first.dtype)
            with agreed(link):
                note = _fill(aside, trained, inputs, block(inputs.n, link.size, link.rank), raw)
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
            wanted = trained.about["data"]["features"]
            if prod(self._array.shape[1:]) != wanted:
                raise ShapeError(f"rows: {rows}: got shape {self._array.shape}, expected (n, {wanted}): the model was trained "
                                 f"on {wanted} features")
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
        raise DataError(f"rows: {path}: the file is damaged, or not a .npy file of numbers ({error})") from None
    if not isinstance(array, np.memmap):
        raise DataError(f"rows: {path}: got an archive of arrays (.npz), expected a .npy file with a single array")
    if (size := os.path.getsize(path) - array.offset) != array.nbytes:
        raise DataError(f"rows: {path}: got {size} bytes of data, expected {array.nbytes} for an array of {array.dtype} and "
                        f"shape {array.shape}; the file is damaged, or holds several arrays")
    if array.ndim < 2 or array.dtype.kind not in "uif":
        raise DataError(f"rows: {path}: got {array.dtype} of shape {array.shape}, expected numbers of shape (n, features)")
    return array


def _open(trained: Trained, data: str | None) -> Data:
    name = data or trained.job.data
    if not data and trained.about["data"]["name"] == "arrays":
        raise UsageError("data: the model was trained on arrays in memory, expected the name of a data set: `data=NAME`")
    task: Task = "classification" if trained.about["data"]["classes"] is not None else "regression"
    names = trained.about["data"].get("class_names")
    found = open_data(name, search_path(os.environ), task=task, test_fraction=trained.job.test_fraction, class_names=names)
    if tuple(names or ()) != (found.class_names or ()):
        came = shown_names(found.class_names)
        raise DataError(f"data: {found.name}: got {came}, expected {shown_names(names)} as in training")
    wanted = trained.about["data"]["features"]
    if found.features != wanted:
        raise DataError(f"data: got {found.name} with {found.features} features, expected {wanted} features as in training")
    return found


def _answers(trained: Trained, x: np.ndarray, raw: bool, begin: int = 0) -> np.ndarray:
    """What stands in the file for rows ``x``, of which the first has the number ``begin``."""
    data = trained.about["data"]
    found = outputs(trained.model, trained.params.views, x, data["features"], begin)
    if raw:
        return found
    if data["classes"] is None or data.get("class_names"):
        return predictions(found, data)
    return class_numbers(found, data["classes"])


def _create(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        np.lib.format.open_memmap(path, "w+", dtype, shape).flush()
        with open(path, "r+b") as file:  # a mapped page that finds no room on the disk would end the process
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def _fill(path: Path, trained: Trained, inputs: _Inputs, part: range, raw: bool) -> str:
    """Predict the rows of this rank in chunks, into their place in the file; returns a note about their scale, or nothing."""
    if not part:
        return ""
    target, note, data = np.lib.format.open_memmap(path, "r+"), "", trained.about["data"]
    for start in range(part.start, part.stop, CHUNK):
        rows = range(start, min(start + CHUNK, part.stop))
        x = inputs.chunk(rows)
        note = note or note_of_scale(data, x)
        target[rows.start : rows.stop] = _answers(trained, x, raw, rows.start)
    target.flush()
    return note


def _say(link: Comm, note: str) -> None:
    """Print one rank's note once, on standard error. Collective."""
    said = next(filter(None, link.allgather(note)), "")
    if said and link.rank == 0:
        print(said, file=sys.stderr, flush=True)
