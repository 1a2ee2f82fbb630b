"""Your own arrays, model and loss, on all ranks: robust linear regression with the Huber loss.

    mpiexec -n 4 python examples/own_model.py        the same numbers as:  python examples/own_model.py

Expect weights within 0.01 of the true ones, though some targets are off by 20.
"""

import numpy as np

import mpiddl


class Huber:
    """Sums over rows of huber(x @ weight + bias - y); shapes name the parameters, gradient fills their sums."""

    shapes = {"weight": (5,), "bias": (1,)}

    def init(self, params, rng):
        params["weight"][:] = 0
        params["bias"][:] = 0

    def gradient(self, params, x, y, grad):
        error = self.predict(params, x) - y
        slope = np.clip(error, -1, 1)
        grad["weight"][:] = x.T @ slope
        grad["bias"][:] = slope.sum()
        return float((slope * (error - slope / 2)).sum())

    def predict(self, params, x):
        return x @ params["weight"] + params["bias"]


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    true = np.array([1.0, -2.0, 3.0, 0.0, 0.5])
    x = rng.standard_normal((4000, 5))
    y = x @ true + 0.1 * rng.standard_normal(4000) + 20.0 * (rng.random(4000) < 0.002)  # a few gross errors

    result = mpiddl.train(Huber(), (x, y), epochs=10, batch=50, rate=0.05, dtype="float64")
    if result.rank == 0:
        weight = result.params["weight"]
        print("weights", np.round(weight, 3), "largest error", abs(weight - true).max().round(4))
