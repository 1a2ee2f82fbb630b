"""From the settings of a job to its data, model, optimiser and schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpiddl.data import Data, Task, open_data
from mpiddl.errors import UsageError
from mpiddl.optim import Constant, Cosine, Optimiser, Schedule, Step
from mpiddl.registry import MODELS, OPTIMISERS
from mpiddl.strategies import Strategy
from mpiddl.training.job import Job
from mpiddl.user_code import check_members, is_reference

MODEL, OPTIMISER = ("shapes", "init", "gradient", "predict"), ("init", "update")
"""The members that a user's own must have."""

TASKS: dict[str, Task | None] = {"auto": None, "cross-entropy": "classification", "squared-error": "regression"}
"""What a loss makes of the labels; None: what they are by themselves."""


def find_data(job: Job, search: Sequence[Path]) -> Data:
    """The data set that ``job`` names, itself or in a folder of ``search``."""
    return open_data(job.data, search, task=TASKS[job.loss], test_fraction=job.test_fraction)


def make_model(job: Job, data: Mapping[str, Any]) -> Any:
    """The model that ``job`` names, for ``data``: ``features``, ``outputs``, ``classes`` (None in a regression), ``shape``.

    The class or function is given what it names as parameters: ``features``, ``outputs``, and ``shape``, that of the features
    of one row. Those of `MODELS` also ``hidden``, ``sizes`` (features, hidden layers, outputs), ``activation``, ``loss`` and
    ``initialisation``.
    """
    features, outputs = data["features"], data["outputs"]
    offered = {"features": features, "outputs": outputs, "shape": tuple(data.get("shape", (features,)))}
    if not is_reference(job.model):
        loss = job.loss if job.loss != "auto" else ("squared-error" if data["classes"] is None else "cross-entropy")
        offered |= {"hidden": job.hidden, "sizes": (features, *job.hidden, outputs), "activation": job.activation,
                    "loss": loss, "initialisation": job.initialisation}
    model = MODELS.make(job.model, **offered)
    check_model(model)
    return model


def unused_settings(job: Job) -> str:
    """A warning of settings that were given, and that the model which ``job`` names does not take; or ""."""
    known = MODELS.parameters(job.model)
    names = [name for name in ("hidden", "activation", "loss", "initialisation") if getattr(job, name) != getattr(Job, name)
             and name not in known and not (name == "hidden" and "sizes" in known)]
    return f"model {job.model} does not use the settings {', '.join(names)}" if names else ""


def check_model(model: Any) -> None:
    """Raise a `UsageError` unless ``model`` has the members of a model."""
    check_members("model", model, MODEL)
    if not isinstance(model.shapes, Mapping):
        raise UsageError(f"model.shapes: got {type(model.shapes).__name__}, expected a dict of names and shapes: "
                         f"{{'w': (3, 2)}}")


def with_optimiser(job: Job, strategy: Strategy) -> Job:
    """``job`` with an optimiser where none was chosen: the strategy's own, otherwise momentum."""
    if job.optimiser != "auto":
        return job
    return replace(job, optimiser=(strategy.optimisers or ("momentum",))[0])


def make_optimiser(job: Job) -> Optimiser:
    """The update rule that ``job`` names; those of mpiddl take its ``momentum`` and ``weight_decay``."""
    offered = {} if is_reference(job.optimiser) else {"momentum": job.momentum, "weight_decay": job.weight_decay}
    optimiser: Optimiser = OPTIMISERS.make(job.optimiser, **offered)
    check_members("optimiser", optimiser, OPTIMISER)
    return optimiser


def make_schedule(job: Job, steps_per_epoch: int, steps: int) -> Schedule:
    """The learning rate as a function of the steps done. ``steps`` is the length of all epochs."""
    rate, warmup = job.learning_rate(), job.warmup * steps_per_epoch
    if job.schedule == "step":
        return Step(rate, every=job.step_epochs * steps_per_epoch, factor=job.step_factor, warmup=warmup)
    if job.schedule == "cosine":
        return Cosine(rate, steps=max(steps, 1), warmup=warmup)
    return Constant(rate, warmup=warmup)
