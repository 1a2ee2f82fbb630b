"""A trained model from a checkpoint: to evaluate, to predict with, on any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpiddl.data.arrays import dense
from mpiddl.data.row_scale import magnitude, scale_note
from mpiddl.errors import CheckpointError, DataError, ShapeError, UsageError
from mpiddl.memory import FlatBuffer
from mpiddl.registry import MODELS
from mpiddl.training import checkpoint
from mpiddl.training.builders import check_model, make_model
from mpiddl.training.checkpoint import Checkpoint
from mpiddl.training.job import FIELDS, Job, make_job
from mpiddl.transport.uncaught import public
from mpiddl.user_code import is_reference


@dataclass(frozen=True)
class Trained:
    """A model and its parameters; see `load`.

    model : Model
    params : FlatBuffer, the parameters, flat and by name.
    job : Job, the settings it was trained with.
    about : the checkpoint's manifest.
    """

    model: Any
    params: FlatBuffer
    job: Job
    about: dict[str, Any]

    @public
    def predict(self, x: np.ndarray) -> np.ndarray:
        """What the model says of rows ``x``, shape (n, features), uint8 (scaled by 1/255) or numbers; no communication.

        Returns
        -------
        ndarray
            Labels, shape (n,), where it was trained on strings. Otherwise the outputs: shape (n, classes), or that of the
            targets of a regression, (n,) or (n, k).

        Raises
        ------
        DataError
            If ``x`` is no array: lists of several lengths, a sparse matrix.
        ShapeError
            If the rows do not have as many features as the model was trained on.
        """
        data, x = self.about["data"], dense(x, "x")
        warn_of_scale(data, x)
        return predictions(outputs(self.model, self.params.views, x, data["features"]), data)

    @public
    def outputs(self, x: np.ndarray) -> np.ndarray:
        """The model's outputs for rows ``x``, as the model computes them; see `predict`."""
        x = dense(x, "x")
        warn_of_scale(self.about["data"], x)
        return outputs(self.model, self.params.views, x, self.about["data"]["features"])


def outputs(model: Any, params: dict[str, np.ndarray], x: np.ndarray, features: int, begin: int = 0) -> np.ndarray:
    """The model's outputs for rows that come as training rows did: uint8 is scaled by 1/255; more axes are flattened.

    ``begin`` is the number of the first row, for messages.
    """
    x = dense(x, "x")
    if x.ndim < 2 or prod(x.shape[1:]) != features:
        raise ShapeError(f"x: got shape {x.shape}, expected (n, {features}): the model was trained on {features} features")
    dtype = next(iter(params.values())).dtype
    scale = dtype.type(1 / 255) if x.dtype == np.uint8 else dtype.type(1)
    with np.errstate(over="ignore"):  # a number that is too large becomes inf, which is an error below
        rows = np.ascontiguousarray(x.reshape(len(x), features), dtype)
    if not np.isfinite(rows).all():
        row, column = np.argwhere(~np.isfinite(rows))[0]
        came = x.reshape(len(x), features)[row, column]
        raise DataError(f"x: got {came} in row {begin + row}, column {column}, expected finite numbers of {dtype}")
    found = model.predict(params, rows * scale)
    if not isinstance(found, np.ndarray) or found.shape[:1] != x.shape[:1]:
        came = f"shape {found.shape}" if isinstance(found, np.ndarray) else type(found).__name__
        raise ShapeError(f"model.predict: returned {came}, expected an array with one row per row of x, which has {len(x)}")
    return found


def warn_of_scale(data: dict[str, Any], x: np.ndarray) -> None:
    """A `UserWarning` where rows ``x`` are not on the scale of the training rows, which ``data`` of a manifest describes."""
    if note := note_of_scale(data, x):
        warnings.warn(note, UserWarning, stacklevel=4)  # the caller of `predict`, through `public`


def note_of_scale(data: dict[str, Any], x: np.ndarray) -> str:
    """The same as a sentence, or nothing."""
    return scale_note(data, magnitude(x), x.dtype == np.uint8)


def predictions(found: np.ndarray, data: Mapping[str, Any]) -> np.ndarray:
    """Outputs as labels, where ``data``, as a manifest describes it, has class names; otherwise in the shape of its targets."""
    if names := data.get("class_names"):
        return np.array(names)[class_numbers(found, len(names))]
    shape = (len(found), *data.get("targets", found.shape[1:]))
    return found.reshape(shape) if data["classes"] is None and found.size == prod(shape) else found


def class_numbers(found: np.ndarray, classes: int) -> np.ndarray:
    """The column of the largest output in each row.

    Raises
    ------
    ShapeError
        If the outputs, which may be those of a user's own model, have no column for each class.
    """
    if found.ndim != 2 or found.shape[1] != classes:
        raise ShapeError(f"model.predict: returned shape {found.shape}, expected (n, {classes}) with one column per class; "
                         "to get the outputs of this model unchanged, call outputs(x), or use predict --raw")
    return found.argmax(axis=1)


@public
def load(path: str | Path, model: Any = None) -> Trained:
    """The model of a checkpoint, or of the newest checkpoint of a run's folder.

    Parameters
    ----------
    path : str or Path
        A run's folder or a checkpoint.
    model : Model or str, optional
        The model that was trained: an object, or ``"module:Class"``. Needed for a model of your own; no code is imported that
        only the checkpoint names.

    Raises
    ------
    CheckpointError
        No checkpoint, a damaged one, one of a user's own model without ``model``, or one of other parameters than it has.
    UsageError
        ``model`` is none.
    """
    return load_with(path, model)


def load_with(path: str | Path, model: Any, by_name: bool = False) -> Trained:
    """`load`; ``by_name``: messages name the model by its module and class, as the command line takes it."""
    found = checkpoint.load(path)
    about = found.manifest
    job = make_job({name: value for name, value in about["job"].items() if name in FIELDS})
    if isinstance(model, str):
        if not is_reference(model):
            raise UsageError(f"model: got {model!r}, expected an object or a name such as 'module:Class'")
        model = make_model(replace(job, model=model), about["data"])
    if model is None:
        model = _network(found, job, by_name)
    check_model(model)
    params = FlatBuffer(model.shapes, job.dtype)
    checkpoint.fill_params(params, found)
    return Trained(model, params, job, about)


def _network(found: Checkpoint, job: Job, by_name: bool) -> Any:
    """The network that a checkpoint describes by its name among `MODELS`; a user's code is not imported."""
    about = dict(found.manifest["model"])
    kind = about.pop("kind", None)
    registered = about.pop("name", "mlp" if kind == "MLP" and "sizes" in about else "")  # older checkpoints have no name
    if registered not in MODELS:
        name = job.model if is_reference(job.model) else f"MODULE:{kind}"
        remedy = f"`model={name!r}`" if by_name else f"mpiddl.load({str(found.path)!r}, model={kind}(...))"
        raise CheckpointError(f"{found.path}: holds parameters of your own model ({kind}), expected this model as well: "
                              f"{remedy}")
    model = MODELS.find(registered)
    names = {each.name for each in fields(model)} - {"threads"}
    return model(**{key: tuple(value) if isinstance(value, list) else value for key, value in about.items() if key in names})
