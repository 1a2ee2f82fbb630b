"""What the caller of a run asked for, and the settings that follow: resolved, and the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpiddl import checkpoint
from mpiddl.conditions import Conditions
from mpiddl.errors import UsageError
from mpiddl.folder import Folder
from mpiddl.job import FIELDS, Job, make_job, read_drop, read_slow
from mpiddl.strategies import Strategy, describe, make_strategy, reproducible
from mpiddl.transport.agree import agreed, check_equal
from mpiddl.version import __version__

# Settings that may change when a run is continued. Any other makes it a different run.
FREE_ON_RESUME = {"data", "epochs", "max_steps", "max_seconds", "max_bytes", "target_accuracy", "keep", "checkpoint_every",
                  "log_every", "threads", "strategy", "shards", "slow", "jitter", "drop", "simulate", "node_workers",
                  "step_seconds", "message_seconds"}


class Request(NamedTuple):
    """What the caller of `mpiddl.train` asked for, as it came; ``spell`` puts a message into the words of this caller."""

    model: Any
    data: Any
    test: Any
    out: Path | None
    resume: bool
    overwrite: bool
    quiet: bool
    optimiser: Any
    strategy: Any
    settings: dict[str, Any]
    resume_step: int | None = None
    spell: Callable[[str], str] = str

    @property
    def goes_on(self) -> bool:
        """Whether a run that is there already is to be continued."""
        return self.resume or self.resume_step is not None

    def of_a_program(self) -> list[str]:
        """What was given as an object, so that no settings can tell it."""
        return [name for name in ("model", "data", "optimiser", "strategy") if is_object(getattr(self, name))]


def agreed_job(control: Any, request: Request) -> tuple[Folder | None, Path | None, Job, Strategy]:
    """The settings that every rank was given, and what follows from them alone. Collective."""
    with agreed(control):
        folder, earlier, settings = _settings(request)
        job = make_job(settings)
        strategy = make_strategy(request.strategy if is_object(request.strategy) else job.strategy)
        strategy.check(control.size)
        strategy = reproducible(strategy) if job.reproducible else strategy
        if strategy.optimisers and not is_object(request.optimiser) and job.optimiser not in strategy.optimisers:
            raise UsageError(
                f"optimiser: got {job.optimiser}, strategy {describe(strategy)} wants {' or '.join(strategy.optimisers)}"
            )
        _check_members("model", request.model, ("shapes", "init", "gradient", "predict"))
        _check_members("optimiser", request.optimiser, ("init", "update"))
        if is_object(request.model) and not isinstance(request.model.shapes, Mapping):
            came = type(request.model.shapes).__name__
            raise UsageError(f"model.shapes: got {came}, expected names and shapes: {{'w': (3, 2)}}")
    check_equal(control, "settings", _fingerprint(job, strategy, request))
    return folder, earlier, job, strategy


def asked_for(link: Any, request: Request) -> Job:
    """The settings, before anything is made of them. Collective."""
    with agreed(link):
        job = make_job(_settings(request)[2])
        if job.simulate and link.size > 1 and not link.simulated:
            raise UsageError(f"simulate: got {link.size} MPI ranks, expected one, which simulates all workers")
        Conditions(read_slow(job.slow), drop=read_drop(job.drop)).check(job.simulate or link.size)
    return job


def _check_members(argument: str, value: Any, wanted: tuple[str, ...]) -> None:
    if isinstance(value, type):
        raise UsageError(f"{argument}: got the class {value.__name__}, expected an object of it: {value.__name__}(...)")
    missing = [name for name in wanted if is_object(value) and not hasattr(value, name)]
    if missing:
        raise UsageError(
            f"{argument}: got {type(value).__name__} without {', '.join(missing)}, "
            f"expected a name or an object with {', '.join(wanted)}"
        )


def _settings(request: Request) -> tuple[Folder | None, Path | None, dict[str, Any]]:
    """The run's folder, the checkpoint to go on from, and the settings: the earlier run's, overruled by the caller's."""
    settings = dict(request.settings)
    for name in ("model", "data", "optimiser", "strategy"):
        if isinstance(value := getattr(request, name), (str, Path)):
            settings[name] = str(value)
    if request.out is None:
        if request.goes_on or request.overwrite:
            raise UsageError("resume, overwrite: got one of them without a folder, expected `out=DIR` beside it")
        return None, None, settings
    if request.goes_on and request.overwrite:
        raise UsageError("resume, overwrite: got both, expected one of them: `resume=True` or `overwrite=True`")
    folder = Folder(request.out)
    earlier = _earlier(request, folder)
    if earlier is None:
        return folder, None, settings
    before = checkpoint.load_manifest(earlier).get("job", {})
    for name, value in make_job(settings).as_dict().items():
        if name in settings and name not in FREE_ON_RESUME and name in before and before[name] != value:
            raise UsageError(
                f"{name}: got {value!r}, the run in {folder.path} was started with {before[name]!r}; expected the same, "
                "or another folder for another run: `out=DIR`"
            )
    return folder, earlier, {**{name: value for name, value in before.items() if name in FIELDS}, **settings}


def _earlier(request: Request, folder: Folder) -> Path | None:
    """The checkpoint to go on from: the newest, or that of the step which was asked for."""
    found = checkpoint.complete(folder.checkpoints)
    if request.resume_step is None:
        return found[-1] if found and request.resume else None
    steps = {checkpoint.step_of(path): path for path in found}
    if request.resume_step not in steps:
        known = ", ".join(map(str, steps)) or "none: there is no checkpoint"
        raise UsageError(f"resume_step: got {request.resume_step!r}, expected a step in {folder.checkpoints}: {known}")
    return steps[request.resume_step]


def is_object(value: Any) -> bool:
    """Whether a caller gave an object of its own where a name could stand."""
    return value is not None and not isinstance(value, str)


def _fingerprint(job: Job, strategy: Strategy, request: Request) -> dict[str, Any]:
    """What has to be the same on every rank."""
    model = request.model
    return {
        **job.as_dict(),
        "strategy object": describe(strategy),
        "model object": type(model).__name__ if is_object(model) else None,
        "optimiser object": describe(request.optimiser) if is_object(request.optimiser) else None,
        "out": str(request.out),
        "resume": request.resume,
        "resume_step": request.resume_step,
        "overwrite": request.overwrite,
        "mpiddl": __version__,
    }


def search_path(env: Mapping[str, str]) -> list[Path]:
    """The folders that MPIDDL_DATA names."""
    return [Path(folder) for folder in env.get("MPIDDL_DATA", "").split(os.pathsep) if folder]
