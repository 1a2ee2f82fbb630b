"""Learning-rate schedules: functions of the step, each with an optional linear warm-up.

A schedule takes the number of finished steps (0 at the first one; fractions are allowed) and returns the learning rate. During
the first `warmup` steps its value is multiplied by (step + 1) / warmup.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

from mpiddl.errors import UsageError
from mpiddl.optim.base import number


@dataclass(frozen=True)
class Constant:
    """A constant learning rate.

    Parameters
    ----------
    rate
        Learning rate, >= 0.
    warmup
        Steps of linear warm-up, >= 0.

    Examples
    --------
    >>> [Constant(0.1, warmup=4)(step) for step in (0, 1, 3, 100)]
    [0.025, 0.05, 0.1, 0.1]
    """

    rate: float
    warmup: float = 0

    def __post_init__(self):
        number("rate", self.rate)
        number("warmup", self.warmup)

    def __call__(self, step: float) -> float:
        """The rate of step `step`."""
        return self.rate * _warm(step, self.warmup)


@dataclass(frozen=True)
class Step:
    """The learning rate is multiplied by `factor` after every `every` steps.

    Parameters
    ----------
    rate, warmup
        As for `Constant`.
    every
        Steps between two drops, > 0.
    factor
        Factor of each drop, >= 0.

    Examples
    --------
    >>> [Step(1.0, every=10, factor=0.5)(step) for step in (0, 9, 10, 20)]
    [1.0, 1.0, 0.5, 0.25]
    """

    rate: float
    every: float
    factor: float = 0.1
    warmup: float = 0

    def __post_init__(self):
        number("rate", self.rate)
        number("factor", self.factor)
        number("warmup", self.warmup)
        if not self.every > 0:
            raise UsageError(f"every: got {self.every!r}, expected a number > 0")

    def __call__(self, step: float) -> float:
        """The rate of step `step`."""
        return self.rate * self.factor ** (step // self.every) * _warm(step, self.warmup)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `rate` (at the end of the warm-up) to `final` (at `steps` and from there on).

    Parameters
    ----------
    rate, warmup
        As for `Constant`.
    steps
        Length of the run, warm-up included; > warmup.
    final
        Learning rate at the end, >= 0.

    References
    ----------
    I. Loshchilov, F. Hutter, SGDR: stochastic gradient descent with warm restarts, ICLR 2017, equation 5, without
    restarts (arXiv:1608.03983).

    Examples
    --------
    >>> [round(Cosine(1.0, steps=100)(step), 3) for step in (0, 25, 50, 100, 200)]
    [1.0, 0.854, 0.5, 0.0, 0.0]
    """

    rate: float
    steps: float
    final: float = 0.0
    warmup: float = 0

    def __post_init__(self):
        number("rate", self.rate)
        number("final", self.final)
        number("warmup", self.warmup)
        if not self.steps > self.warmup:
            raise UsageError(f"steps: got {self.steps!r}, expected more than the {self.warmup!r} steps of warm-up")

    def __call__(self, step: float) -> float:
        """The rate of step `step`."""
        done = min(1.0, max(0.0, (step - self.warmup) / (self.steps - self.warmup)))
        return (self.final + (self.rate - self.final) * (1 + cos(pi * done)) / 2) * _warm(step, self.warmup)


Schedule = Constant | Step | Cosine


def linear_scaling(rate: float, batch: int, reference: int) -> float:
    """Scale the learning rate `rate` for `reference` rows to a global batch of `batch` rows, in proportion.

    References
    ----------
    P. Goyal et al., Accurate, large minibatch SGD: training ImageNet in 1 hour, section 2.1 (arXiv:1706.02677).

    Examples
    --------
    >>> linear_scaling(0.1, batch=1024, reference=256)
    0.4
    """
    number("rate", rate)
    for argument, rows in (("batch", batch), ("reference", reference)):
        if not rows > 0:
            raise UsageError(f"{argument}: got {rows!r}, expected a number of rows > 0")
    return rate * batch / reference


def _warm(step: float, warmup: float) -> float:
    """The factor of the linear warm-up."""
    return min(1.0, (step + 1) / warmup) if warmup else 1.0
