"""Which dimension of a module's tensors counts samples: found by a trial.

A module treats samples independently if a part of the samples gives the part of the output, or if the mean or the sum of what
all parts give, such as a loss, is the output. The trial computes the output of all samples and that of a part, in evaluation
mode and without gradients, and compares. It uses parameters and inputs with some noise on them, because equal or vanishing
numbers prove nothing. Each rank tries its own part: the first samples alone would agree in a sequence, too, where the later
ones depend on the earlier ones.

The trial uses copies of the module, and leaves random state as before.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpiddl.layout import block

SEED = 1
"""Of the noise, the same on all ranks."""

NOISE = 0.05
"""Least standard deviation of the noise."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.complex128: 1e-8, torch.complex64: 1e-3}
"""Of two results that differ by rounding, relative to the largest number in them; 0.02 for types with fewer bits."""


MOST_REDUCED = 1024
"""Elements of a tensor that may be a mean or a sum over samples."""

USUAL = frozenset(vars(torch.nn.Module()))
"""Attributes of every module."""


class Place(NamedTuple):
    """Where the samples are in a tensor.

    dim : the dimension.
    inner : in a flattened dimension, samples change faster than what they were flattened with.
    """

    dim: int
    inner: bool = False


class Reduced(NamedTuple):
    """A small tensor, such as a loss, that is made of all samples: the mean over them, or their sum."""

    mean: bool


Part = Place | Reduced | None
"""What the results of all ranks are to the whole: parts of it; its summands; or each of them is the whole."""


class Division(NamedTuple):
    """The places of samples in the tensors of a call; None: the tensor has none, and is used whole.

    inputs, outputs : one for each tensor, in the order of `torch.utils._pytree.tree_flatten`.
    """

    inputs: tuple[Place | None, ...]
    outputs: tuple[Part, ...]


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def with_tensors(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """The same nest with other tensors."""
    leaves, spec = tree_flatten(tree)
    left = iter(tensors)
    return tree_unflatten([next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def samples_in(inputs: Sequence[Tensor], places: Sequence[Place | None]) -> int | None:
    """The number of samples, the same in all tensors that have a place for them; None if it is not."""
    found = {tensor.shape[place.dim] if place.dim < tensor.ndim else -1
             for tensor, place in zip(inputs, places, strict=True) if place is not None}
    return found.pop() if len(found) == 1 else None


def unflattened(tensor: Tensor, place: Place, samples: int) -> tuple[Tensor, int]:
    """The tensor with a dimension for samples alone, and that dimension."""
    length, dim = tensor.shape[place.dim], place.dim
    if length == samples:
        return tensor, dim
    sizes = (length // samples, samples) if place.inner else (samples, length // samples)
    return tensor.unflatten(dim, sizes), dim + place.inner


def candidates(inputs: Sequence[Tensor], least: int) -> Iterator[tuple[Place | None, ...]]:
    """Possible places of samples, of which there are ``least`` or more: the first dimension first.

    Examples
    --------
    >>> list(candidates([torch.zeros(35, 20), torch.zeros(2, 20, 8)], 2))[:2]
    [(Place(dim=0, inner=False), None), (Place(dim=1, inner=False), Place(dim=1, inner=False))]
    """
    tried = set()
    for first in inputs:
        for dim, length in enumerate(first.shape):
            if length < least:
                continue
            places = tuple(_with_length(tensor, length, dim) for tensor in inputs)
            if places not in tried:
                tried.add(places)
                yield places


def _with_length(tensor: Tensor, length: int, preferred: int) -> Place | None:
    if preferred < tensor.ndim and tensor.shape[preferred] == length:
        return Place(preferred)
    return next((Place(dim) for dim, size in enumerate(tensor.shape) if size == length), None)


def least_samples(modules: Iterable[torch.nn.Module]) -> int:
    """The least number of samples that modules accept in training: two if their mean and variance are used."""
    return 2 if any(isinstance(module, _BatchNorm) for module in modules) else 1


def find_division(module: torch.nn.Module, call: Any, size: int, rank: int,
                  agree: Callable[[Any], list[Any]]) -> Division | str:
    """How the samples of ``call``, a pair of positional and named arguments, are divided over ranks; or why they are not.

    ``agree`` returns what it is given on each rank; the answer is the same on all of them. Collective.
    """
    with _as_before():
        try:
            values = {name: _noisy(value) for name, value in module.named_parameters()}
            noisy = with_tensors(call, [_noisy(tensor) for tensor in tensors_of(call)])
            seen = _seen(noisy)
            whole, kept_whole = _result(module, values, noisy)
            failure = "it changes its arguments" if _seen(noisy) != seen else ""
        except Exception as error:
            failure = f"a trial in evaluation mode failed: {type(error).__name__}: {error}"
        if any(failures := agree(failure)):
            return next(filter(None, failures))
        inputs = tensors_of(noisy)
        for places in candidates(inputs, size):
            samples = samples_in(inputs, places)
            assert samples is not None
            mine = _outputs(module, values, noisy, places, block(samples, size, rank), samples, whole, kept_whole)
            answers = agree(mine)
            if None not in answers and (outputs := _common(answers, tensors_of(whole), samples)) is not None:
                return Division(places, outputs)
    return "no dimension was found whose parts give the parts of the result"


def _seen(call: Any) -> Any:
    """What a call would change in its arguments."""
    leaves, spec = tree_flatten(call)
    return str(spec), [leaf._version if isinstance(leaf, Tensor) else None for leaf in leaves]


def _outputs(module: torch.nn.Module, values: dict[str, Tensor], call: Any, places: Sequence[Place | None], kept: range,
             samples: int, whole: Any, kept_whole: dict[Any, Any]) -> list[Place | Tensor | None] | None:
    """Where the samples ``kept`` give their part of ``whole``: the places in the outputs, or small outputs themselves."""
    parts = [tensor if place is None else tensor.narrow(place.dim, kept.start, len(kept))
             for tensor, place in zip(tensors_of(call), places, strict=True)]
    try:
        part, kept_part = _result(module, values, with_tensors(call, parts))
    except Exception:  # a module may refuse a part, whatever it raises
        return None
    (theirs, theirs_as), (mine, mine_as) = tree_flatten(whole), tree_flatten(part)
    if theirs_as != mine_as or not _same(kept_whole, kept_part):
        return None
    found = list[Place | Tensor | None]()
    for full, own in zip(theirs, mine, strict=True):
        if not isinstance(full, Tensor):
            if isinstance(own, Tensor) or not _same(full, own):
                return None
            continue
        fits = [place for place in _forms(full, own, samples, len(kept)) if _is_part(full, own, place, samples, kept)]
        small = isinstance(own, Tensor) and own.shape == full.shape and own.numel() <= MOST_REDUCED and own.is_floating_point()
        if not fits and not small:
            return None
        found.append(fits[0] if fits else own)
    return found


def _common(answers: list[Any], whole: list[Tensor], samples: int) -> tuple[Part, ...] | None:
    """What the outputs of all ranks are to those of the whole; None if they do not fit, or say nothing of the samples."""
    found = list[Part]()
    for full, *each in zip(whole, *answers, strict=True):
        if not any(isinstance(one, Tensor) for one in each):
            if any(one != each[0] for one in each):
                return None
            found.append(each[0])
            continue
        if not all(isinstance(one, Tensor) for one in each):
            return None
        sums = {Reduced(mean): sum(one * (len(block(samples, len(each), rank)) / samples if mean else 1.0)
                                   for rank, one in enumerate(each)) for mean in (True, False)}
        fits = [form for form, total in sums.items() if _close(full, total)]
        if not fits:
            return None
        found.append(fits[0])
    return tuple(found) if any(each is not None for each in found) else None


def _forms(full: Any, own: Any, samples: int, kept: int) -> Iterator[Place | None]:
    if not isinstance(own, Tensor) or full.ndim != own.ndim or full.dtype != own.dtype:
        return
    differ = [dim for dim in range(full.ndim) if full.shape[dim] != own.shape[dim]]
    if not differ:
        yield None
    if len(differ) == 1:
        length, part = full.shape[differ[0]], own.shape[differ[0]]
        if length % samples == 0 and part * samples == length * kept:
            yield Place(differ[0])
            if length != samples:
                yield Place(differ[0], inner=True)


def _is_part(full: Tensor, own: Tensor, place: Place | None, samples: int, kept: range) -> bool:
    if place is not None:
        (full, dim), (own, _) = unflattened(full, place, samples), unflattened(own, place, len(kept))
        full = full.narrow(dim, kept.start, len(kept))
    if not (full.is_floating_point() or full.is_complex()):
        return bool(torch.equal(full, own))
    return _close(full, own)


def _close(full: Tensor, own: Tensor) -> bool:
    limit = full.abs().max().item() * TOLERANCE.get(full.dtype, 0.02) if full.numel() else 0.0
    return bool(torch.isfinite(full).all()) and bool(((full - own).abs() <= limit).all())


def _noisy(tensor: Tensor) -> Tensor:
    """The tensor plus noise, if it holds real or complex numbers."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout != torch.strided:
        return tensor.detach()
    spread = float(tensor.detach().abs().mean()) if tensor.numel() else 0.0
    return tensor.detach() + torch.randn_like(tensor) * max(NOISE, spread if spread < 1e30 else NOISE) / 2


def _result(module: torch.nn.Module, values: dict[str, Tensor], call: Any) -> tuple[Any, dict[str, Any]]:
    """What a copy of the module returns in evaluation mode, and what differs in its attributes afterwards."""
    copied = copy.deepcopy(module).eval()
    before = _attributes(copy.deepcopy(module))
    found = functional_call(copied, values, *call)
    after = _attributes(copied)
    return found, {name: value for name, value in after.items() if name not in before or not _same(value, before[name])}


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Attributes that a module has beside those of `torch.nn.Module`, and so for all modules in it."""
    return {f"{path}.{name}": value for path, each in module.named_modules() for name, value in vars(each).items()
            if name not in USUAL and name != "_flat_weights"}


def _same(mine: Any, theirs: Any) -> bool:
    """Whether two values are equal, with all that is in nested containers; values that cannot be compared by value are."""
    (left, left_as), (right, right_as) = tree_flatten(mine), tree_flatten(theirs)
    return left_as == right_as and all(map(_same_leaf, left, right))


def _same_leaf(mine: Any, theirs: Any) -> bool:
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, Tensor):
        return mine.shape == theirs.shape and bool(torch.equal(mine, theirs))
    if isinstance(mine, (bool, int, float, complex, str, bytes, type(None))):
        return bool(mine == theirs)
    if isinstance(mine, np.ndarray):
        return bool(np.array_equal(mine, theirs))
    if dataclasses.is_dataclass(mine):
        return _same(vars(mine), vars(theirs))
    return True


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Without gradients and printing; random state is as before afterwards."""
    state, plain, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    nowhere = io.StringIO()
    try:
        torch.default_generator.manual_seed(SEED)
        with torch.no_grad(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    finally:
        torch.set_rng_state(state)
        random.setstate(plain)
        np.random.set_state(of_numpy)  # noqa: NPY002
