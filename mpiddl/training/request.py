"""What the caller of a run asked for, and the settings that follow: resolved, and the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from mpiddl.errors import UsageError
from mpiddl.strategies import Strategy, describe, make_strategy, reproducible, spelled
from mpiddl.training import checkpoint
from mpiddl.training.builders import OPTIMISER, check_model, with_optimiser
from mpiddl.training.conditions import Conditions
from mpiddl.training.job import FIELDS, Job, make_job, read_drop, read_slow, without_aliases
from mpiddl.training.run_folder import Folder
from mpiddl.transport.agree import agreed, check_equal
from mpiddl.transport.comm import Comm
from mpiddl.user_code import check_members, is_reference
from mpiddl.version import __version__

# Settings that may change when a run is continued. Any other makes it a different run.
FREE_ON_RESUME = {"data", "epochs", "max_steps", "max_seconds", "max_bytes", "target_accuracy", "keep", "checkpoint_every",
                  "log_every", "threads", "strategy", "shards", "slow", "jitter", "drop", "simulate", "node_workers",
                  "step_seconds", "message_seconds"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the caller of `mpiddl.train` asked for, as it came; ``spell`` puts a message into the words of this caller."""

    model: Any = None
    data: Any = None
    test: Any = None
    out: Path | None = None
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False
    optimiser: Any = None
    strategy: Any = None
    settings: dict[str, Any]
    resume_step: int | None = None
    spell: Callable[[str], str] = str

    @property
    def goes_on(self) -> bool:
        """Whether a run that is there already is to be continued."""
        return self.resume or self.resume_step is not None

    def without_aliases(self) -> Request:
        """The request with each setting by its own name, and a path to data as text; an optimiser object has an alias, too."""
        settings = without_aliases(({} if self.optimiser is None else {"optimiser": self.optimiser}) | self.settings)
        data = str(self.data) if isinstance(self.data, Path) else self.data
        return replace(self, data=data, optimiser=settings.pop("optimiser", None), settings=settings)

    def of_a_program(self) -> list[str]:
        """What was given as an object, so that no settings can tell it."""
        return [name for name in ("model", "data", "optimiser", "strategy") if is_object(getattr(self, name))]


def agreed_job(control: Comm, request: Request) -> tuple[Folder | None, Path | None, Job, Strategy]:
    """The settings that every rank was given, and what follows from them alone. Collective."""
    with agreed(control):
        folder, earlier, settings = _settings(request)
        job = make_job(settings)
        strategy = make_strategy(request.strategy if is_object(request.strategy) else job.strategy)
        strategy.check(control.size)
        strategy = reproducible(strategy) if job.reproducible else strategy
        if job.optimiser not in (strategy.optimisers or (job.optimiser,)) and not optimiser_chosen(request, earlier):
            job = replace(job, optimiser="auto")
        job = with_optimiser(job, strategy)
        own = is_object(request.optimiser) or is_reference(job.optimiser)
        if strategy.optimisers and not own and job.optimiser not in strategy.optimisers:
            raise UsageError(
                f"optimiser: got {job.optimiser}, expected {' or '.join(strategy.optimisers)} for strategy {spelled(strategy)}"
            )
        if own:
            _check_parameters(job)
        if is_object(request.model):
            check_model(request.model)
        if is_object(request.optimiser):
            check_members("optimiser", request.optimiser, OPTIMISER)
    check_equal(control, "settings", _fingerprint(job, strategy, request))
    return folder, earlier, job, strategy


def optimiser_chosen(request: Request, earlier: Path | None) -> bool:
    """Whether the caller chose the optimiser, in this call or in the run that is resumed; otherwise it suits the strategy."""
    given = request.settings.get("optimiser") if request.optimiser is None else request.optimiser
    if is_object(given) or given not in (None, "auto"):
        return True
    return earlier is not None and bool(checkpoint.load_manifest(earlier, resume=True).get("optimiser_chosen", True))


def _check_parameters(job: Job) -> None:
    """Raise a `UsageError` for settings that only the optimisers of mpiddl take, and an own one would not see."""
    for name in ("momentum", "weight_decay"):
        if (value := getattr(job, name)) != FIELDS[name].default:
            raise UsageError(f"{name}: got {value:g} with an optimiser of your own, expected it as a parameter of this "
                             f"optimiser: Class({name}={value:g}) or MODULE:CLASS:{name}={value:g}")


def asked_for(link: Comm, request: Request) -> Job:
    """The settings, before anything is made of them. Collective."""
    with agreed(link):
        job = make_job(_settings(request)[2])
        if job.simulate and link.size > 1 and not link.simulated:
            raise UsageError(f"simulate: got {link.size} MPI ranks, expected 1, because one process simulates all workers")
        Conditions(read_slow(job.slow), drop=read_drop(job.drop)).check(job.simulate or link.size)
    return job


def _settings(request: Request) -> tuple[Folder | None, Path | None, dict[str, Any]]:
    """The run's folder, the checkpoint to go on from, and the settings: the earlier run's, overruled by the caller's."""
    settings = dict(request.settings)
    for name in ("model", "data", "optimiser", "strategy"):
        if isinstance(value := getattr(request, name), str):
            settings[name] = value
    if settings.get("optimiser") == "auto":  # no choice: a run that is resumed keeps its own
        del settings["optimiser"]
    _check_folder(request)
    if request.out is None:
        return None, None, settings
    folder = Folder(request.out)
    earlier = _earlier(request, folder)
    if earlier is None:
        return folder, None, settings
    before = checkpoint.load_manifest(earlier, resume=True).get("job", {})
    usual = make_job({name: value for name, value in before.items() if name in FIELDS}).learning_rate()
    for name, value in make_job(settings).as_dict().items():
        if name in settings and name not in FREE_ON_RESUME and name in before and before[name] != value:
            wanted = before[name]
            if name == "rate" and not wanted and not before.get("scale_rate"):
                wanted = usual  # 0 is the default of the optimiser
            if value == wanted:
                settings.pop(name)
                continue
            raise UsageError(
                f"{name}: got {value!r}, expected {wanted!r} as at the start of the run in {folder.path}; "
                "for a new run, name another folder: `out=DIR`"
            )
    _check_code(request, settings, before, earlier)
    return folder, earlier, {**{name: value for name, value in before.items() if name in FIELDS}, **settings}


def _check_folder(request: Request) -> None:
    """Raise a `UsageError` for what says how to treat the run's folder, where it is wrong or does not fit together."""
    step = request.resume_step
    if step is not None and (not isinstance(step, Integral) or isinstance(step, bool) or step < 0):
        raise UsageError(f"resume_step: got {step!r}, expected a whole number, 0 or more")
    options = {"resume": request.resume, "resume_step": step is not None, "overwrite": request.overwrite}
    given = [name for name, there in options.items() if there]
    if given and request.out is None:
        raise UsageError(f"{', '.join(given)}: got no folder, expected the folder of the run: `out=DIR`")
    if request.goes_on and request.overwrite:
        resume = "`resume=True`" if step is None else f"`resume_step={step}`"
        raise UsageError(f"{', '.join(given)}: got {len(given)} options, expected only {resume} or only `overwrite=True`")


def _check_code(request: Request, settings: Mapping[str, Any], before: Mapping[str, Any], earlier: Path) -> None:
    """Raise a `UsageError` for code that only a checkpoint names: it may come from another person, and is not imported."""
    for name in ("model", "optimiser", "strategy"):
        text = before.get(name)
        if name not in settings and not is_object(getattr(request, name)) and isinstance(text, str) and is_reference(text):
            raise UsageError(f"{name}: got {text!r} only from {earlier}, expected it in this call as well, because a "
                             f"checkpoint may come from another person: `{name}={text!r}`")


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
