"""Is a model's gradient the gradient of its loss? Finite differences, and the promises of the model protocol."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.memory import FlatBuffer
from mpiddl.models.base import Model, Score

STEP = 1e-6
"""Central differences err by step^2 (truncation) and 1e-16/step (rounding): both far below the default tolerance."""


@dataclass(frozen=True)
class ArrayReport:
    """The worst of the elements tried in one array."""

    name: str
    tried: int
    error: float
    index: tuple[int, ...]
    gradient: float
    difference: float


@dataclass(frozen=True)
class GradientReport:
    """What `gradcheck` found; true if all is well, and readable when printed.

    Attributes
    ----------
    arrays
        One `ArrayReport` for each parameter array; ``error`` is the distance between gradient and finite difference,
        relative to the largest element of either in that array.
    broken
        Promises of the protocol that were not kept, one sentence each.
    tolerance
        The largest error that passes.
    """

    arrays: tuple[ArrayReport, ...]
    broken: tuple[str, ...]
    tolerance: float

    def __bool__(self) -> bool:
        return not self.broken and all(array.error <= self.tolerance for array in self.arrays)

    def __str__(self) -> str:
        lines = [f"{'array':<12} {'tried':>5} {'error':>9}  worst element"]
        for array in self.arrays:
            mark = "ok" if array.error <= self.tolerance else "WRONG"
            lines.append(
                f"{array.name:<12} {array.tried:>5} {array.error:>9.1e}  {list(array.index)}: gradient "
                f"{array.gradient:.6g}, finite difference {array.difference:.6g}  {mark}"
            )
        return "\n".join([*lines, *self.broken])


def gradcheck(
    model: Model, x: np.ndarray, y: np.ndarray, *, samples: int = 40, tolerance: float = 1e-5, seed: int = 0
) -> GradientReport:
    """Compare a model's gradient with central finite differences, in float64, and try the promises of the protocol.

    Parameters
    ----------
    model
        Any object that follows `Model`.
    x, y
        A few rows (two at least); x is converted to float64.
    samples
        Elements tried in each parameter array, drawn at random; all of them in arrays that have no more.
    tolerance
        Largest relative error that passes. A parameter on the kink of a ReLU shows a false error: try another `seed`.
    seed
        Of the parameters (``model.init``, then a little noise, so that no bias stays zero) and of the elements tried.

    Returns
    -------
    GradientReport
        ``assert report, report`` shows everything when something is wrong.

    Examples
    --------
    >>> import numpy as np
    >>> from mpiddl.models import MLP, gradcheck
    >>> rng = np.random.default_rng(0)
    >>> bool(gradcheck(MLP((5, 4, 3)), rng.normal(size=(6, 5)), np.array([0, 1, 2, 0, 1, 2])))
    True
    """
    rng = np.random.default_rng(seed)
    x = np.asarray(x, np.float64)
    params = FlatBuffer(model.shapes, np.float64)
    model.init(params.views, rng)
    params.flat += rng.normal(0.0, 0.01, params.flat.shape)
    grad = _gradient(model, params, x, y)
    arrays = (_compare(model, params, grad, name, x, y, samples, rng) for name in model.shapes)
    return GradientReport(tuple(arrays), tuple(_broken(model, params, grad, x, y)), tolerance)


def _gradient(model: Model, params: FlatBuffer, x: np.ndarray, y: np.ndarray, **keywords: Any) -> FlatBuffer:
    """The gradient, written over NaN so that what is not written shows."""
    grad = FlatBuffer(model.shapes, np.float64)
    grad.flat[:] = np.nan
    model.gradient(params.views, x, y, grad.views, **keywords)
    return grad


def _loss(model: Model, params: FlatBuffer, x: np.ndarray, y: np.ndarray) -> float:
    """The summed loss."""
    result = model.gradient(params.views, x, y, FlatBuffer(model.shapes, np.float64).views)
    return result.loss if isinstance(result, Score) else float(result)


def _compare(
    model: Model, params: FlatBuffer, grad: FlatBuffer, name: str, x: np.ndarray, y: np.ndarray, samples: int,
    rng: np.random.Generator,
) -> ArrayReport:
    """The worst of some elements of one array."""
    part = params.slice(name)
    size = part.stop - part.start
    if not size:
        return ArrayReport(name, 0, 0.0, (), 0.0, 0.0)
    chosen = part.start + rng.choice(size, min(samples, size), replace=False)
    found = grad.flat[chosen]
    wanted = np.array([_difference(model, params, i, x, y) for i in chosen])
    unit = max(np.abs(wanted).max(), np.abs(grad.flat[part]).max(), 1e-8)
    error = np.nan_to_num(np.abs(found - wanted) / unit, nan=np.inf)
    worst = int(error.argmax())
    index = tuple(map(int, np.unravel_index(chosen[worst] - part.start, model.shapes[name])))
    return ArrayReport(name, len(chosen), float(error[worst]), index, float(found[worst]), float(wanted[worst]))


def _difference(model: Model, params: FlatBuffer, i: int, x: np.ndarray, y: np.ndarray) -> float:
    """The central difference of the loss along parameter i."""
    value = params.flat[i]
    step = STEP * max(1.0, abs(value))
    losses = []
    for moved in (value + step, value - step):
        params.flat[i] = moved
        losses.append(_loss(model, params, x, y))
    params.flat[i] = value
    return (losses[0] - losses[1]) / (2 * step)


def _broken(model: Model, params: FlatBuffer, grad: FlatBuffer, x: np.ndarray, y: np.ndarray) -> Iterator[str]:
    """Promises that the model does not keep: sums over rows, zero rows, every element announced once and when final."""
    half = len(x) // 2
    parts = _gradient(model, params, x[:half], y[:half]).flat + _gradient(model, params, x[half:], y[half:]).flat
    if not np.allclose(parts, grad.flat, rtol=1e-9, atol=1e-9 * np.abs(grad.flat).max(initial=0)):
        yield "gradient: that of all rows is not the sum of those of two halves; expected a sum over the rows, not a mean"
    if _gradient(model, params, x[:0], y[:0]).flat.any() or _loss(model, params, x[:0], y[:0]) != 0:
        yield "gradient: no rows must give gradient zero, everywhere, and loss 0"
    if "ready" in inspect.signature(model.gradient).parameters:
        yield from _announcements(model, params, grad, x, y)


def _announcements(model: Any, params: FlatBuffer, grad: FlatBuffer, x: np.ndarray, y: np.ndarray) -> Iterator[str]:
    """Whether `ready` hears of every element once, when it is final, in the same order for any number of rows."""
    buffer = FlatBuffer(model.shapes, np.float64)
    heard: list[slice] = []
    final: list[bool] = []

    def ready(part: slice) -> None:
        heard.append(part)
        final.append(np.array_equal(buffer.flat[part], grad.flat[part]))

    model.gradient(params.views, x, y, buffer.views, ready=ready)
    count = np.zeros(buffer.flat.size, int)
    for part in heard:
        count[part] += 1
    if (count != 1).any():
        yield f"ready: element {int((count != 1).argmax())} is announced {count[(count != 1).argmax()]} times, not once"
    if not all(final):
        yield f"ready: {heard[final.index(False)]} is announced before it is final"
    empty: list[slice] = []
    model.gradient(params.views, x[:0], y[:0], buffer.views, ready=empty.append)
    if empty != heard:
        yield "ready: no rows are announced in another order than some rows"
