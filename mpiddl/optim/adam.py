"""Adam, and AdamW with decoupled weight decay.

    g = scale * grad [+ weight_decay * p: Adam]     m = beta1 m + (1 - beta1) g     s = beta2 s + (1 - beta2) g^2
    p = [(1 - rate * weight_decay): AdamW] p - rate * m / (1 - beta1^t) / (sqrt(s / (1 - beta2^t)) + eps)

with t = step + 1. The rules are those of ``torch.optim.Adam`` and ``torch.optim.AdamW``. Cost: one pass over the flat
arrays, 4 reads and 3 writes per parameter.

References
----------
D. Kingma, J. Ba, Adam: a method for stochastic optimization, ICLR 2015, algorithm 1 (arXiv:1412.6980).
I. Loshchilov, F. Hutter, Decoupled weight decay regularization, ICLR 2019, algorithm 2 (arXiv:1711.05101); the decay
is multiplied by the rate, as torch does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np
from numpy.typing import DTypeLike

from mpiddl import kernels
from mpiddl.memory import aligned_zeros, float_dtype
from mpiddl.optim.base import Moments, matching, number


@dataclass(frozen=True)
class Adam:
    """Adam. Weight decay is an L2 penalty added to the gradient.

    Parameters
    ----------
    beta1, beta2
        Decay of the mean gradient and of the mean square, each in [0, 1).
    eps
        Added to the root of the mean square, >= 0.
    weight_decay
        Weight of the penalty, >= 0.

    Raises
    ------
    UsageError
        If a value is outside its range.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    decoupled: ClassVar[bool] = False

    def __post_init__(self):
        number("beta1", self.beta1, below=1.0)
        number("beta2", self.beta2, below=1.0)
        number("eps", self.eps)
        number("weight_decay", self.weight_decay)

    def init(self, n: int, dtype: DTypeLike) -> Moments:
        """The running means of the gradient and of its square (see `Optimiser.init`)."""
        return {name: aligned_zeros(n, float_dtype(dtype)) for name in ("mean", "square")}

    def update(
        self, params: np.ndarray, grad: np.ndarray, moments: Moments, rate: float, scale: float = 1.0, step: int = 0
    ) -> None:
        """One step in place (see `Optimiser.update`)."""
        mean, square = moments["mean"], moments["square"]
        matching(params, grad, mean, square)
        step_size = rate / (1 - self.beta1 ** (step + 1))
        root = 1 / sqrt(1 - self.beta2 ** (step + 1))
        decay, shrink = (0.0, 1 - rate * self.weight_decay) if self.decoupled else (self.weight_decay, 1.0)
        scalars = step_size, scale, decay, shrink, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2, root, self.eps
        kernels.adam(params, grad, mean, square, *map(params.dtype.type, scalars))


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: each step multiplies the weights by ``1 - rate * weight_decay``.

    Parameters and errors are those of `Adam`.
    """

    weight_decay: float = 0.01

    decoupled: ClassVar[bool] = True
