"""The data and the model of a run, the same on all ranks."""

from __future__ import annotations

import os
from typing import Any
from zlib import crc32

import numpy as np

from mpiddl.data import Data, arrays_data
from mpiddl.errors import UsageError
from mpiddl.training.builders import TASKS, find_data, make_model
from mpiddl.training.job import Job
from mpiddl.training.request import Request, is_object, search_path
from mpiddl.transport.agree import agreed, check_equal
from mpiddl.transport.comm import Comm


def agreed_data(control: Comm, job: Job, request: Request) -> tuple[Data, Any]:
    """The data set and the model for it, the same on every rank. Collective."""
    with agreed(control):
        data = _open_data(job, request)
        model = _model(job, data, request)
        seen = {"training rows": data.train.n, "test rows": data.test.n if data.test else 0, "features": data.features,
                "outputs": data.outputs, "parameters": {name: tuple(shape) for name, shape in model.shapes.items()}}
        if is_object(request.data) and not isinstance(request.data, Data):
            seen["contents (checksum)"] = _checksum(request.data)
    check_equal(control, "data", seen)
    return data, model


def _checksum(arrays: Any) -> int:
    """Of all targets, and of the first and last row: what ranks that each load a part of their own differ in."""
    x, y = (array if hasattr(array, "shape") else np.asarray(array) for array in arrays)
    parts = [np.ascontiguousarray(part) for part in (y, x[:1], x[-1:])]
    return crc32(b"".join(map(_contents, parts)))


def _contents(array: np.ndarray) -> bytes:
    """The same for equal arrays: objects are addresses, and an extended float has bytes that mean nothing."""
    if array.dtype.hasobject:
        return repr(array.tolist()).encode()
    return (array.astype(np.float64) if array.dtype.char == "g" else array).tobytes()


def _open_data(job: Job, request: Request) -> Data:
    if isinstance(request.data, Data):
        return request.data
    if is_object(request.data):
        x, y = _pair("data", request.data)
        x_test, y_test = (None, None) if request.test is None else _pair("test", request.test)
        return arrays_data(x, y, x_test, y_test, task=TASKS[job.loss], test_fraction=job.test_fraction)
    if request.test is not None:
        raise UsageError("test: got test rows for a named data set, expected test rows only with arrays, data=(x, y)")
    return find_data(job, search_path(os.environ))


def _pair(argument: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        came = f"{len(value)} arrays" if isinstance(value, (tuple, list)) else type(value).__name__
        named = " or the name of a data set" if argument == "data" else ""
        raise UsageError(f"{argument}: got {came}, expected a pair of arrays (x, y){named}")
    if any(isinstance(array, np.ma.MaskedArray) for array in value):
        raise UsageError(f"{argument}: got a masked array, expected a plain array; fill the missing values or leave out "
                         "these rows")
    return value[0], value[1]


def _model(job: Job, data: Data, request: Request) -> Any:
    if is_object(request.model):
        return request.model
    return make_model(job, described(data))


def described(data: Data) -> dict[str, Any]:
    """What a model needs to know of its rows."""
    return {"features": data.features, "outputs": data.outputs, "classes": data.classes, "shape": data.train.shape}
