"""Your own optimiser: linear regression with an L1 and an L2 penalty, by gradient steps and a proximal step.

    mpiexec -n 4 python examples/own_optimiser.py    the same numbers as:  python examples/own_optimiser.py

Expect "25 of 25": the weights of all features that do not matter are exactly 0. By name, in the folder examples:

    mpiexec -n 4 mpiddl train --optimiser own_optimiser:Proximal:l1=0.001 --rate 0.1
    mpiexec -n 4 mpiddl train --optimiser own_optimiser:Lion --rate 0.001 --strategy asgd

Sources: A. Beck, M. Teboulle, SIAM J. Imaging Sciences 2(1), 2009 (ISTA); X. Chen et al., arXiv:2302.06675, algorithm 2 (Lion).
"""

from dataclasses import dataclass

import numpy as np

import mpiddl


@dataclass(frozen=True)
class Proximal:
    """Minimises the mean loss + l1 * sum(abs(p)) + l2/2 * sum(p**2)."""

    l1: float = 0.0
    l2: float = 0.0

    def init(self, n, dtype):
        return {}

    def update(self, params, grad, moments, rate, scale=1.0, step=0):
        params -= rate * (scale * grad + self.l2 * params)  # scale * grad is the mean over the rows of the batch
        shrunk = np.maximum(np.abs(params) - rate * self.l1, 0)
        np.copysign(shrunk, params, out=params)


@dataclass(frozen=True)
class Lion:
    """Steps along the sign of a running mean of the gradient."""

    beta1: float = 0.9
    beta2: float = 0.99

    def init(self, n, dtype):
        return {"mean": np.zeros(n, dtype)}

    def update(self, params, grad, moments, rate, scale=1.0, step=0):
        mean = moments["mean"]
        params -= rate * np.sign(self.beta1 * mean + (1 - self.beta1) * scale * grad)
        mean *= self.beta2
        mean += (1 - self.beta2) * scale * grad


def main():
    rng = np.random.default_rng(0)
    true = np.where(np.arange(30) < 5, [2.0, -1.0, 3.0, -2.0, 1.0] * 6, 0.0)
    x = rng.standard_normal((4000, 30))
    y = x @ true + 0.2 * rng.standard_normal(4000)
    result = mpiddl.train("softmax", (x, y), optimiser=Proximal(l1=0.1), rate=0.1, epochs=20, batch=400, dtype="float64")
    if result.rank == 0:
        weight = result.params["weight1"][:, 0]
        print("weights that are exactly 0:", (weight[true == 0] == 0).sum(), "of", (true == 0).sum())
        print("largest error of the others:", abs(weight - true)[true != 0].max().round(3), "(the L1 penalty makes it 0.1)")


if __name__ == "__main__":
    main()
