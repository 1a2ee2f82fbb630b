"""Stochastic gradient descent, plain, with momentum, or with Nesterov's momentum.

    g = scale * grad + weight_decay * p          v = momentum * v + g
    p = p - rate * g        p = p - rate * v     p = p - rate * (g + momentum * v)
    (plain)                 (momentum)           (Nesterov)

Weight decay is coupled (an L2 penalty); there is no dampening. The rule is that of ``torch.optim.SGD``. Cost: one pass
over the flat arrays, 3 reads and 2 writes per parameter (2 and 1 without momentum).

References
----------
I. Sutskever, J. Martens, G. Dahl, G. Hinton, On the importance of initialization and momentum in deep learning, ICML 2013,
equations 1-4; the velocity here is theirs divided by -rate, so that a change of the learning rate takes effect at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from mpiddl import kernels
from mpiddl.errors import UsageError
from mpiddl.memory import aligned_zeros, float_dtype
from mpiddl.optim.base import Moments, matching, number


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent.

    Parameters
    ----------
    momentum
        Factor of the last velocity, in [0, 1).
    nesterov
        Use Nesterov momentum; needs momentum above 0.
    weight_decay
        Weight of the L2 penalty weight_decay/2 * ||p||^2, >= 0.

    Raises
    ------
    UsageError
        If a value is outside its range, or `nesterov` is set without momentum.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self):
        number("momentum", self.momentum, below=1.0)
        number("weight_decay", self.weight_decay)
        if self.nesterov and not self.momentum:
            raise UsageError("nesterov: got True with momentum 0, expected momentum > 0, such as 0.9")

    def init(self, n: int, dtype: DTypeLike) -> Moments:
        """The velocity, or nothing without momentum (see `Optimiser.init`)."""
        return {"velocity": aligned_zeros(n, float_dtype(dtype))} if self.momentum else {}

    def update(
        self, params: np.ndarray, grad: np.ndarray, moments: Moments, rate: float, scale: float = 1.0, step: int = 0
    ) -> None:
        """One step in place (see `Optimiser.update`)."""
        matching(params, grad, *moments.values())
        real = params.dtype.type
        scalars = real(rate), real(scale), real(self.weight_decay)
        if not self.momentum:
            kernels.sgd(params, grad, *scalars)
        elif self.nesterov:
            kernels.nesterov(params, grad, moments["velocity"], *scalars, real(self.momentum))
        else:
            kernels.momentum(params, grad, moments["velocity"], *scalars, real(self.momentum))


def plain(weight_decay: float = 0.0) -> SGD:
    """`SGD` without momentum."""
    return SGD(weight_decay=weight_decay)


def nesterov(momentum: float = 0.9, weight_decay: float = 0.0) -> SGD:
    """`SGD` with Nesterov momentum."""
    return SGD(momentum, nesterov=True, weight_decay=weight_decay)
