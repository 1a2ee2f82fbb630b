"""A training job: every setting, its default and its meaning, in one place.

The flags of ``mpiddl train``, the keys of a TOML job file and the keywords of `mpiddl.train` are the fields of `Job`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from mpiddl.errors import UsageError
from mpiddl.registry import MODELS, OPTIMISERS, STRATEGIES, Entry
from mpiddl.user_code import is_reference

ALIASES = {"lr": "rate", "learning_rate": "rate", "optimizer": "optimiser", "batch_size": "batch"}
"""Other names of settings, as users of other packages know them."""

LARGEST = 10**300  # beyond, floats end

SLOWEST = 1e6
"""Largest factor by which a rank may be slower."""

_UNUSUAL = {entry.rate: [name for name in OPTIMISERS if OPTIMISERS[name].rate == entry.rate] for entry in OPTIMISERS.values()
            if entry.rate != Entry.rate}
USUAL_RATES = ", ".join(f"{rate:g} for {' and '.join(names)}" for rate, names in _UNUSUAL.items()) + \
    f", {Entry.rate:g} for all others"
"""The learning rates that are the defaults, for the help."""

DATA, MODEL, OPTIMISATION, RANKS, SIMULATION, OUTPUT = "Data", "Model", "Optimisation", "Ranks", "Simulation", "Output"
"""Headings of the settings in ``mpiddl train --help``."""


def setting(default: Any, text: str, group: str, choices: Collection[str] = (), least: float | None = None,
            most: float | None = None, above: float | None = None, form: str = "", user_code: bool = False) -> Any:
    """A field of `Job`: default, meaning, heading in the help, accepted values; ``user_code``: ``module:Name`` is one too."""
    bounds = {"least": least, "most": most, "above": above}
    about = {"text": text, "group": group, "choices": choices, "form": form, "user_code": user_code}
    return dataclasses.field(default=default, metadata={**about, **bounds})


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

    data: str = setting("digits", "data set: 'digits', the path of a file or folder, or the name of one in a folder listed in "
                        "MPIDDL_DATA", DATA)
    test_fraction: float = setting(0.2, "share of the rows kept as test rows if the data set has none of its own (0: no test)",
                                   DATA, least=0, most=0.9)
    validation: float = setting(0.1, "share of the training rows kept for validation", DATA, least=0, most=0.9)
    model: str = setting("mlp", f"network: {', '.join(MODELS)}, or your own class: MODULE:CLASS[:key=value,...]", MODEL,
                         MODELS, user_code=True)
    hidden: tuple[int, ...] = setting((64,), "sizes of the hidden layers, from first to last", MODEL, least=1)
    activation: str = setting("relu", "activation of the hidden layers", MODEL, ("relu", "tanh"))
    initialisation: str = setting("he", "distribution of the initial weights", MODEL, ("he", "glorot"))
    loss: str = setting("auto", "loss function (auto: cross-entropy for labels, squared-error for other targets)", MODEL,
                        ("auto", "cross-entropy", "squared-error"))
    dtype: str = setting("float32", "precision of parameters and gradients", MODEL, ("float32", "float64"))
    epochs: int = setting(10, "passes over the training rows", OPTIMISATION, least=0)
    batch: int = setting(64, "samples per step, counted over all ranks together", OPTIMISATION, least=1)
    optimiser: str = setting("auto", f"update rule: {', '.join(OPTIMISERS)}, or your own class: "
                             "MODULE:CLASS[:key=value,...] (auto: the rule that the strategy needs, otherwise momentum)",
                             OPTIMISATION, ("auto", *OPTIMISERS), user_code=True)
    rate: float = setting(0.0, f"learning rate (0: default of the optimiser, {USUAL_RATES})", OPTIMISATION, least=0)
    momentum: float = setting(0.9, "momentum factor of the optimisers 'momentum' and 'nesterov'", OPTIMISATION, least=0, most=1)
    weight_decay: float = setting(0.0, "factor of the L2 penalty (with adamw: decoupled weight decay)", OPTIMISATION, least=0)
    clip: float = setting(0.0, "scale the mean gradient down to norm X if its norm is larger (0: no limit)",
                          OPTIMISATION, least=0)
    schedule: str = setting("cosine", "schedule of the learning rate", OPTIMISATION, ("constant", "step", "cosine"))
    warmup: float = setting(0.0, "epochs at the start of the run in which the learning rate rises from 0 to its full value",
                            OPTIMISATION, least=0)
    step_epochs: float = setting(10.0, "schedule 'step': epochs between two reductions of the learning rate", OPTIMISATION,
                                 above=0)
    step_factor: float = setting(0.1, "schedule 'step': factor of the learning rate at each reduction", OPTIMISATION,
                                 above=0, most=1)
    scale_rate: int = setting(0, "multiply the learning rate by batch / N, the linear scaling rule (0: no scaling)",
                              OPTIMISATION, least=0)
    seed: int = setting(0, "seed of the initial weights, the data split and the order of the samples", OPTIMISATION, least=0)
    max_steps: int = setting(0, "stop after N steps, counted from the start of the run (0: no limit)", OPTIMISATION, least=0)
    max_seconds: float = setting(0.0, "stop after X seconds and write a checkpoint (0: no limit)", OPTIMISATION, least=0)
    max_bytes: int = setting(0, "stop after all ranks together have sent N bytes (0: no limit)", OPTIMISATION, least=0)
    target_accuracy: float = setting(0.0, "stop when the validation accuracy reaches X, between 0 and 1 (0: never)",
                                     OPTIMISATION, least=0, most=1)
    strategy: str = setting("allreduce", f"strategy by which ranks combine their work: {', '.join(STRATEGIES)} (docs/names.md "
                            "says what each does), with parameters as in local-sgd:period=8, or your own class: "
                            "MODULE:CLASS[:key=value,...]", RANKS)
    reproducible: bool = setting(False, "compute bit-identical weights on 1, 2, 4, 8 or 16 ranks, at a higher cost", RANKS)
    shards: int = setting(0, "virtual shards into which the rows are divided (0: 16, or one per rank for more than 16 ranks)",
                          RANKS, least=0)
    threads: int = setting(0, "BLAS and numba threads per rank (0: number of cores / number of ranks on the node)",
                           RANKS, least=0)
    slow: str = setting("", "make ranks slower: 3:4 makes rank 3 four times as slow, spread:4 makes the training ranks 1 to 4 "
                        "times as slow (evenly spread), straggler:8 makes the last of them 8 times as slow", RANKS,
                        form="RANK:FACTOR,...")
    jitter: float = setting(0.0, "make each step longer by a random share of its time, X on average (0: off)", RANKS, least=0)
    drop: str = setting("", "stop ranks before a step: 3:40 stops rank 3 permanently before step 40, and 3:40:60 stops it "
                        "there for the time of 20 steps", RANKS, form="RANK:STEP[:STEP],...")
    simulate: int = setting(0, "train on N virtual workers in one process, with a simulated clock (0: train on the MPI ranks)",
                            SIMULATION, least=0)
    node_workers: int = setting(1, "virtual workers on each virtual node", SIMULATION, least=1)
    step_seconds: float = setting(1.0, "simulated time of the computation of a step, in seconds", SIMULATION, least=0)
    message_seconds: float = setting(0.0, "simulated time of a message, in seconds", SIMULATION, least=0)
    log_every: int = setting(50, "number of steps between two lines of metrics", OUTPUT, least=1)
    validate_every: int = setting(0, "number of steps between two validations (0: one validation after each epoch)", OUTPUT,
                                  least=0)
    checkpoint_every: int = setting(0, "number of steps between two checkpoints (0: one checkpoint after each epoch)",
                                    OUTPUT, least=0)
    keep: int = setting(3, "number of newest checkpoints to keep", OUTPUT, least=1)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field, getattr(self, field.name)))
        if self.target_accuracy and not self.validation:
            raise UsageError("target_accuracy: got a target but no validation rows, expected `validation` above 0")
        read_slow(self.slow)
        read_drop(self.drop)
        if self.reproducible and self.threads > 1:
            raise UsageError(
                f"threads: got {self.threads}, expected 1 (or 0) with `reproducible`: "
                "the bits of a sum depend on the number of threads"
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON and TOML."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()}

    def learning_rate(self) -> float:
        """The base rate: the one given, or the optimiser's usual one; scaled with the batch if asked."""
        usual = OPTIMISERS.get(self.optimiser.partition(":")[0], Entry).rate
        return (self.rate or usual) * (self.batch / self.scale_rate if self.scale_rate else 1.0)


def read_slow(text: str, trainers: Sequence[int] = ()) -> dict[int, float]:
    """``RANK:FACTOR,RANK:FACTOR`` as a mapping; or ``spread:FACTOR`` or ``straggler:FACTOR`` for the ranks that train.

    Raises
    ------
    UsageError
        For anything else, a factor below 1 or above 10^6, or a rank that is given twice.

    Examples
    --------
    >>> read_slow("3:4,5:1.5")
    {3: 4.0, 5: 1.5}
    >>> read_slow("spread:4", [0, 1, 2]), read_slow("straggler:8", [0, 1, 2]), read_slow("straggler:8", [0])
    ({0: 1.0, 1: 2.5, 2: 4.0}, {2: 8.0}, {})
    """
    pattern, _, most = text.partition(":")
    if pattern in ("spread", "straggler") and "," not in text:
        largest = read_slow(f"0:{most}")[0]
        shares = dict.fromkeys(trainers[-1:], 1.0)
        if pattern == "spread":
            shares = {rank: index / (len(trainers) - 1 or 1) for index, rank in enumerate(trainers)}
        return {rank: 1 + share * (largest - 1) for rank, share in shares.items()} if len(trainers) > 1 else {}
    found: dict[int, float] = {}
    for part in filter(None, text.split(",")):
        rank, colon, factor = part.partition(":")
        try:
            number, times = int(rank), float(factor)
        except ValueError:
            number, times = -1, 0.0
        if not colon or number < 0 or not 1 <= times <= SLOWEST or number in found:
            raise UsageError(f"slow: got {part!r}, expected RANK:FACTOR with a factor from 1 to {SLOWEST:g}, such as 3:4, once "
                             "per rank; or spread:FACTOR or straggler:FACTOR")
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
            raise UsageError(f"drop: got {part!r}, expected RANK:STEP or RANK:STEP:LATER_STEP, such as 3:40:60, once per rank")
        found[numbers[0]] = (numbers[1], numbers[2] if len(numbers) == 3 else None)
    return found


FIELDS = {field.name: field for field in dataclasses.fields(Job)}


def make_job(settings: Mapping[str, Any]) -> Job:
    """A `Job` from names and values; an unknown name is a `UsageError` that suggests the nearest one."""
    settings = without_aliases(settings)
    check_names(settings, FIELDS)
    return Job(**settings)


def without_aliases(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by their own names instead of those in `ALIASES`.

    Raises
    ------
    UsageError
        If one is given by two names.

    Examples
    --------
    >>> without_aliases({"lr": 0.1, "epochs": 3})
    {'rate': 0.1, 'epochs': 3}
    """
    names: dict[str, str] = {}
    for given in settings:
        name = ALIASES.get(given, given)
        if name in names:
            raise UsageError(f"{names[name]}, {given}: got two names of the same setting, expected only {name}")
        names[name] = given
    return {name: settings[given] for name, given in names.items()}


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
    """The settings in a TOML job file, flat or under ``[train]``, by their own names; unchecked until `make_job`.

    Raises
    ------
    UsageError
        If the file cannot be read or is not TOML.
    """
    settings = read_toml(path)
    section = settings.get("train")
    if not isinstance(section, dict):
        return without_aliases(settings)
    if len(settings) > 1:
        beside = ", ".join(name for name in settings if name != "train")
        raise UsageError(f"job file {path}: got {beside} outside [train], expected all settings in the section [train], or "
                         "no such section")
    return without_aliases(section)


def _checked(field: dataclasses.Field[Any], value: Any) -> Any:
    """``value`` in the field's type, or a `UsageError`."""
    value = _typed(field, value)
    choices = field.metadata["choices"]
    named = value.partition(":")[0] in choices or is_reference(value) if field.metadata["user_code"] else value in choices
    if choices and not named:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        own = ", or MODULE:CLASS" * field.metadata["user_code"]
        raise UsageError(f"{field.name}: got {value!r}, expected one of {', '.join(choices)}{own}{hint}")
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
            raise UsageError(f"{field.name}: got a number of more than 300 digits, expected a smaller number")
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
