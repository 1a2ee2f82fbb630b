"""From the settings of a job to its data, model, optimiser and schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpiddl import user_code
from mpiddl.data import Data, Task, open_data
from mpiddl.errors import UsageError
from mpiddl.models import MLP
from mpiddl.optim import SGD, Adam, AdamW, Constant, Cosine, Optimiser, Schedule, Step
from mpiddl.strategies import Strategy
from mpiddl.training.job import Job

MODEL, OPTIMISER = ("shapes", "init", "gradient", "predict"), ("init", "update")
"""The members that a user's own must have."""

TASKS: dict[str, Task | None] = {"auto": None, "cross-entropy": "classification", "squared-error": "regression"}
"""What a loss makes of the labels; None: what they are by themselves."""


def find_data(job: Job, search: Sequence[Path]) -> Data:
    """The data set that ``job`` names, itself or in a folder of ``search``."""
    return open_data(job.data, search, task=TASKS[job.loss], test_fraction=job.test_fraction)


def make_model(job: Job, features: int, outputs: int, labels: bool) -> Any:
    """The model that ``job`` names for rows of ``features`` numbers; ``labels`` says whether targets are classes."""
    if user_code.is_reference(job.model):
        return own_model(job.model, features, outputs)
    hidden = job.hidden if job.model == "mlp" else ()
    loss = job.loss if job.loss != "auto" else ("cross-entropy" if labels else "squared-error")
    sizes = (features, *hidden, outputs)
    return MLP(sizes, activation=job.activation, loss=loss, initialisation=job.initialisation)  # type: ignore[arg-type]


def own_model(text: str, features: int, outputs: int) -> Any:
    """The user's own model that ``text`` names; its class or function may take ``features`` and ``outputs``."""
    model = user_code.make("model", text, MODEL, features=features, outputs=outputs)
    check_model(model)
    return model


def check_model(model: Any) -> None:
    """Raise a `UsageError` unless ``model`` has the members of a model."""
    user_code.check_members("model", model, MODEL)
    if not isinstance(model.shapes, Mapping):
        raise UsageError(f"model.shapes: got {type(model.shapes).__name__}, expected a dict of names and shapes: "
                         f"{{'w': (3, 2)}}")


def with_optimiser(job: Job, strategy: Strategy) -> Job:
    """``job`` with an optimiser where none was chosen: the strategy's own, otherwise momentum."""
    if job.optimiser != "auto":
        return job
    return replace(job, optimiser=(strategy.optimisers or ("momentum",))[0])


def make_optimiser(job: Job) -> Optimiser:
    """The update rule that ``job`` names."""
    if user_code.is_reference(job.optimiser):
        own: Optimiser = user_code.make("optimiser", job.optimiser, OPTIMISER)
        return own
    if job.optimiser == "adam":
        return Adam(weight_decay=job.weight_decay)
    if job.optimiser == "adamw":
        return AdamW(weight_decay=job.weight_decay)
    momentum = 0.0 if job.optimiser == "sgd" else job.momentum
    return SGD(momentum=momentum, nesterov=job.optimiser == "nesterov", weight_decay=job.weight_decay)


def make_schedule(job: Job, steps_per_epoch: int, steps: int) -> Schedule:
    """The learning rate as a function of the steps done. ``steps`` is the length of all epochs."""
    rate, warmup = job.learning_rate(), job.warmup * steps_per_epoch
    if job.schedule == "step":
        return Step(rate, every=job.step_epochs * steps_per_epoch, factor=job.step_factor, warmup=warmup)
    if job.schedule == "cosine":
        return Cosine(rate, steps=max(steps, 1), warmup=warmup)
    return Constant(rate, warmup=warmup)
