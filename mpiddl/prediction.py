"""A trained model from a checkpoint: to evaluate, to predict with, on any number of ranks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpiddl import checkpoint
from mpiddl.errors import CheckpointError, ShapeError
from mpiddl.job import FIELDS, Job, make_job
from mpiddl.memory import FlatBuffer
from mpiddl.recipes import make_model
from mpiddl.row_scale import magnitude, scale_note


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

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Outputs for rows ``x``, shape (n, features), uint8 (scaled by 1/255) or numbers; no communication.

        Raises
        ------
        ShapeError
            If the rows do not have as many features as the model was trained on.
        """
        warn_of_scale(self.about["data"], x)
        return outputs(self.model, self.params.views, x, self.about["data"]["features"])


def outputs(model: Any, params: dict[str, np.ndarray], x: np.ndarray, features: int) -> np.ndarray:
    """The model's outputs for rows that come as training rows did: uint8 is scaled by 1/255; more axes are flattened."""
    x = np.asarray(x)
    if x.ndim < 2 or prod(x.shape[1:]) != features:
        raise ShapeError(f"x: got shape {x.shape}, expected (n, {features}): the model was trained on {features} features")
    dtype = next(iter(params.values())).dtype
    scale = dtype.type(1 / 255) if x.dtype == np.uint8 else dtype.type(1)
    return model.predict(params, np.ascontiguousarray(x.reshape(len(x), features), dtype) * scale)


def warn_of_scale(data: dict[str, Any], x: Any) -> None:
    """A `UserWarning` where rows ``x`` are not on the scale of the training rows, which ``data`` of a manifest describes."""
    if note := note_of_scale(data, np.asarray(x)):
        warnings.warn(note, UserWarning, stacklevel=3)


def note_of_scale(data: dict[str, Any], x: np.ndarray) -> str:
    """The same as a sentence, or nothing."""
    return scale_note(data, magnitude(x), x.dtype == np.uint8)


def load(path: str | Path) -> Trained:
    """The model of a checkpoint, or of the newest checkpoint of a run's folder.

    Raises
    ------
    CheckpointError
        No checkpoint, a damaged one, or one of a user's own model (fill its parameters from
        `mpiddl.checkpoint.load(path).model` instead).
    """
    found = checkpoint.load(path)
    about = found.manifest
    if about["model"].get("kind") != "MLP":
        raise CheckpointError(
            f"{found.path}: holds a model of your own ({about['model'].get('kind')}); expected one that mpiddl builds. "
            "mpiddl.checkpoint.load(path).model has its arrays"
        )
    job = make_job({name: value for name, value in about["job"].items() if name in FIELDS})
    data = about["data"]
    model = make_model(job, data["features"], data["outputs"], data["classes"] is not None)
    params = FlatBuffer(model.shapes, job.dtype)
    checkpoint.fill_params(params, found)
    return Trained(model, params, job, about)
