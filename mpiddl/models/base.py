"""What a model is: pure functions of arrays. Any object with these members can be trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from mpiddl.errors import UsageError

Arrays = dict[str, np.ndarray]
Ready = Callable[[slice], None]


class Score(NamedTuple):
    """Sums over some rows: of the losses, and of the rows whose class was found.

    ``correct`` is None where there are no classes (regression).
    """

    loss: float
    correct: int | None = None


def as_score(value: object) -> Score:
    """What a model's ``gradient`` or ``score`` returned, as a `Score`; a `UsageError` if it is no number."""
    try:
        if isinstance(value, Score):  # of numbers that checkpoints and messages can hold
            return Score(float(value.loss), None if value.correct is None else int(value.correct))
        return Score(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UsageError(
            f"model.gradient: returned {type(value).__name__}, expected a number, which is the sum of the losses, or a Score"
        ) from None


class Model(Protocol):
    """The members that training asks for; a user's own class need not inherit from this one.

    All results are sums over the rows, never means: ranks hold different numbers of rows, sums add up and means do not.
    Zero rows are legal: gradient zero, loss 0.
    """

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters, in the order in which they lie in the flat buffer."""
        ...

    def init(self, params: Arrays, rng: np.random.Generator) -> None:
        """Fill the views with the values to start from, drawn from `rng` alone."""
        ...

    def gradient(self, params: Arrays, x: np.ndarray, y: np.ndarray, grad: Arrays) -> float | Score:
        """Overwrite the views `grad` with the gradient of the summed loss, and return that loss.

        Two more keywords are passed to a function that takes them:

        ready
            Callable, called with the slice of the flat gradient that has just become final, last layer first; every
            element is announced exactly once, in the same order whatever the number of rows. Communication of a layer
            can then run beside the rest of the backward pass.
        work
            What `workspace` returned.
        """
        ...

    def predict(self, params: Arrays, x: np.ndarray) -> np.ndarray:
        """Outputs for the rows of `x`: shape (n, classes), or (n, k) in regression."""
        ...

    # Optional members:
    #
    # def score(self, params, x, y) -> Score         the sums of `gradient` without its gradient
    # def workspace(self, max_rows, dtype) -> Any    all scratch arrays of a step, so that a step allocates nothing
    # def warm(self, dtype) -> None                  compile everything that a training step calls
