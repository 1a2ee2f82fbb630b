"""A training job: every setting, its default and its meaning, in one place.

The flags of ``mpiddl train``, the keys of a TOML job file and the keywords of `mpiddl.train` are the fields of `Job`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from mpiddl.errors import UsageError

LARGEST = 10**300  # beyond, floats end


def setting(default: Any, text: str, choices: tuple[str, ...] = (), least: float | None = None, most: float | None = None,
            above: float | None = None) -> Any:
    """A field of `Job`: its default, its meaning in words, and which values are taken."""
    bounds = {"least": least, "most": most, "above": above}
    return dataclasses.field(default=default, metadata={"text": text, "choices": choices, **bounds})


@dataclass(frozen=True)
class Job:
    """The settings of one training run; see each field's ``metadata["text"]`` or ``mpiddl train --help``.

    Raises
    ------
    UsageError
        If a value is of the wrong type, out of its range or not among the choices.

    Examples
    --------
    >>> Job(epochs=3, hidden=(256, 128)).epochs
    3
    >>> Job(epochs=-1)
    Traceback (most recent call last):
        ...
    mpiddl.errors.UsageError: epochs: got -1, expected 0 or more
    """

    data: str = setting("digits", "data set: 'digits', or a folder or file, itself or under a folder of MPIDDL_DATA")
    test_fraction: float = setting(0.2, "rows held out for the test when the data has no test set; 0: none", least=0, most=0.9)
    validation: float = setting(0.1, "fraction of the training rows kept for validation", least=0, most=0.9)
    model: str = setting("mlp", "network: mlp, or softmax (no hidden layers)", ("mlp", "softmax"))
    hidden: tuple[int, ...] = setting((64,), "widths of the hidden layers, first to last, separated by commas", least=1)
    activation: str = setting("relu", "activation of the hidden layers", ("relu", "tanh"))
    initialisation: str = setting("he", "distribution of the initial weights", ("he", "glorot"))
    loss: str = setting("auto", "loss; auto: cross-entropy for labels, squared-error else",
                        ("auto", "cross-entropy", "squared-error"))
    dtype: str = setting("float32", "precision of parameters and gradients", ("float32", "float64"))
    epochs: int = setting(10, "passes over the training rows", least=0)
    max_steps: int = setting(0, "stop after so many steps in all; 0: no limit", least=0)
    batch: int = setting(64, "samples a step, over all ranks together", least=1)
    shards: int = setting(0, "virtual shards the rows are cut into; 0: 16, above 16 ranks the next multiple", least=0)
    seed: int = setting(0, "seed of the weights, the split and the order of the samples", least=0)
    optimiser: str = setting("momentum", "update rule of the parameters", ("sgd", "momentum", "nesterov", "adam", "adamw"))
    rate: float = setting(0.0, "learning rate; 0: 0.05 for sgd, momentum and nesterov, 0.001 for adam and adamw", least=0)
    momentum: float = setting(0.9, "momentum of 'momentum' and 'nesterov'", least=0, most=1)
    weight_decay: float = setting(0.0, "L2 penalty (adamw: decoupled decay)", least=0)
    clip: float = setting(0.0, "largest norm of the mean gradient; 0: none", least=0)
    schedule: str = setting("cosine", "course of the learning rate over the run", ("constant", "step", "cosine"))
    warmup: float = setting(0.0, "epochs over which the rate rises from 0", least=0)
    step_epochs: float = setting(10.0, "schedule 'step': epochs between two reductions", above=0)
    step_factor: float = setting(0.1, "schedule 'step': factor of each reduction", above=0, most=1)
    scale_rate: int = setting(0, "scale the rate by batch / this batch size (linear scaling); 0: do not", least=0)
    strategy: str = setting("allreduce", "how ranks agree: allreduce, auto, two-step, ring[:overlap=1], delayed[:delay=1], "
                            "local-sgd[:period=8], hierarchical[:period=8], gossip, gossip-adaptive, elastic, ..., or a "
                            "parameter server, asgd, ddc-asgd, ... "
                            "[:servers=N,communication=auto|one-sided|two-sided]: docs/strategies.md")
    reproducible: bool = setting(False, "the same weights, bit for bit, on 1, 2, 4, ... ranks, one a shard at most; slower")
    threads: int = setting(0, "BLAS and numba threads a rank; 0: cores / ranks of the node", least=0)
    slow: str = setting("", "RANK:FACTOR,...: ranks that compute slower; 3:4 has rank 3 take four times as long")
    jitter: float = setting(0.0, "mean share by which each step takes longer, drawn at random; 0: none", least=0)
    drop: str = setting("", "RANK:STEP[:STEP],...: ranks that are gone before a step of theirs, for as long as the steps up to "
                        "the second one would take; without it, for good")
    simulate: int = setting(0, "train on so many virtual workers with a simulated clock, in one process; 0: on the MPI ranks",
                            least=0)
    node_workers: int = setting(1, "simulate: workers on each node", least=1)
    step_seconds: float = setting(1.0, "simulate: what computing a step takes", least=0)
    message_seconds: float = setting(0.0, "simulate: what a message takes", least=0)
    log_every: int = setting(50, "steps between two lines of metrics", least=1)
    checkpoint_every: int = setting(0, "steps between two checkpoints; 0: one an epoch", least=0)
    keep: int = setting(3, "checkpoints kept, the newest", least=1)
    max_seconds: float = setting(0.0, "stop cleanly, with a checkpoint, after so many seconds; 0: no limit", least=0)
    max_bytes: int = setting(0, "stop cleanly after so many bytes sent by all ranks (at their own pace, when they meet); 0: no "
                             "limit", least=0)
    target_accuracy: float = setting(0.0, "stop when the validation accuracy (0 to 1) reaches this; 0: never", least=0, most=1)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field, getattr(self, field.name)))
        if self.target_accuracy and not self.validation:
            raise UsageError("target_accuracy: got a target without validation rows, expected `validation` above 0 beside it")
        read_slow(self.slow)
        read_drop(self.drop)
        if self.reproducible and self.threads > 1:
            raise UsageError(
                f"threads: got {self.threads}, expected 1 (or 0) with `reproducible`: a library's sums change with their number"
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON and TOML."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()}

    def digest(self) -> str:
        """A hash that is equal on two ranks exactly if their settings are."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()

    def learning_rate(self) -> float:
        """The base rate: the one given, or the optimiser's usual one; scaled with the batch if asked."""
        usual = 0.001 if self.optimiser.startswith("adam") else 0.05
        return (self.rate or usual) * (self.batch / self.scale_rate if self.scale_rate else 1.0)


def read_slow(text: str) -> dict[int, float]:
    """``RANK:FACTOR,RANK:FACTOR`` as a mapping.

    Raises
    ------
    UsageError
        For anything else, a factor below 1, or a rank that is told twice.

    Examples
    --------
    >>> read_slow("3:4,5:1.5")
    {3: 4.0, 5: 1.5}
    """
    found: dict[int, float] = {}
    for part in filter(None, text.split(",")):
        rank, colon, factor = part.partition(":")
        try:
            number, times = int(rank), float(factor)
        except ValueError:
            number, times = -1, 0.0
        if not colon or number < 0 or not 1 <= times < float("inf") or number in found:
            raise UsageError(f"slow: got {part!r}, expected RANK:FACTOR with a factor from 1, each rank once, such as 3:4")
        found[number] = times
    return found


def read_drop(text: str) -> dict[int, tuple[int, int | None]]:
    """``RANK:STEP:STEP,RANK:STEP`` as a mapping; None where there is no second step.

    Raises
    ------
    UsageError
        For anything else, a second step that is not after the first, or a rank that is told twice.

    Examples
    --------
    >>> read_drop("3:40:60,5:100")
    {3: (40, 60), 5: (100, None)}
    """
    found: dict[int, tuple[int, int | None]] = {}
    for part in filter(None, text.split(",")):
        numbers = [int(word) if word.isdecimal() and len(word) < 19 else -1 for word in part.split(":")]
        if len(numbers) not in (2, 3) or min(numbers) < 0 or numbers[0] in found or numbers[-1] <= (numbers[1:-1] or [-1])[0]:
            raise UsageError(f"drop: got {part!r}, expected RANK:STEP or RANK:STEP:LATER_STEP, each rank once, such as 3:40:60")
        found[numbers[0]] = (numbers[1], numbers[2] if len(numbers) == 3 else None)
    return found


FIELDS = {field.name: field for field in dataclasses.fields(Job)}


def make_job(settings: Mapping[str, Any]) -> Job:
    """A `Job` from names and values; an unknown name is a `UsageError` that suggests the nearest one."""
    check_names(settings, FIELDS)
    return Job(**settings)


def check_names(given: Iterable[str], known: Iterable[str], what: str = "setting") -> None:
    """Raise a `UsageError` for a name that is not ``known``; it suggests the nearest one."""
    names = list(known)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
            raise UsageError(f"unknown {what} {name!r}; {hint}")


def read_toml(path: str | Path) -> dict[str, Any]:
    """What is in a TOML file.

    Raises
    ------
    UsageError
        If the file cannot be read or is not TOML.
    """
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"job file {path}: {error.strerror}; expected a TOML file of settings") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"job file {path}: not TOML ({error})") from None


def read_job_file(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML job file, flat or under ``[train]``; unchecked until `make_job`.

    Raises
    ------
    UsageError
        If the file cannot be read or is not TOML.
    """
    settings = read_toml(path)
    section = settings.get("train")
    if not isinstance(section, dict):
        return settings
    if len(settings) > 1:
        beside = ", ".join(name for name in settings if name != "train")
        raise UsageError(f"job file {path}: got {beside} beside [train], expected all settings in it or none")
    return section


def _checked(field: dataclasses.Field[Any], value: Any) -> Any:
    """``value`` in the field's type, or a `UsageError`."""
    value = _typed(field, value)
    choices = field.metadata["choices"]
    if choices and value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"{field.name}: got {value!r}, expected one of {', '.join(choices)}{hint}")
    for part in value if isinstance(value, tuple) else (value,):
        _bounded(field, part)
    return value


def _typed(field: dataclasses.Field[Any], value: Any) -> Any:
    kind = type(field.default)
    if kind is bool and isinstance(plain := value.item() if hasattr(value, "item") else value, bool):
        return plain
    if kind is tuple and (parts := _whole_numbers(value)) is not None:
        return parts
    if (kind is float and _is_number(value, Real)) or (kind is int and _is_number(value, Integral)):
        if isinstance(value, Integral) and abs(int(value)) > LARGEST:
            raise UsageError(f"{field.name}: got a number of more than 300 digits, expected a smaller one")
        return kind(value)
    if not isinstance(value, kind) or kind is not str:
        wanted = {tuple: "a list of whole numbers", int: "a whole number", float: "a number", str: "a word",
                  bool: "true or false"}[kind]
        raise UsageError(f"{field.name}: got {value!r}, expected {wanted}")
    return value


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    """A number, or a sequence or array of them, as a tuple; None if it is none of these."""
    value = value.tolist() if hasattr(value, "tolist") else value
    parts = value if isinstance(value, (list, tuple)) else [value]
    return tuple(int(part) for part in parts) if all(_is_number(part, Integral) for part in parts) else None


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _bounded(field: dataclasses.Field[Any], value: Any) -> None:
    least, most, above = (field.metadata[name] for name in ("least", "most", "above"))
    if isinstance(value, str):
        return
    low = (least is None or value >= least) and (above is None or value > above)
    if math.isfinite(value) and low and (most is None or value <= most):
        return
    wanted = f"above {above:g}" if above is not None else f"{least:g} or more"
    raise UsageError(f"{field.name}: got {value:g}, expected {wanted}" + (f", at most {most:g}" if most is not None else ""))
