"""Do parameters whose gradient is always zero, or always 1e-8, change what `ddc-asgd` does with all others?

The digits network with 8 simulated workers: relative distance of the live weights after 100 steps, and test accuracy after 10
epochs, with and without dead parameters.

    .venv/bin/python tests/programs/dead_parameters.py
"""

import numpy as np

import mpiddl


class WithDeadParameters(mpiddl.MLP):
    """An `MLP` with ``dead`` parameters whose gradient is always ``slope``."""

    dead, slope = 1, 0.0

    @property
    def shapes(self):
        return {**super().shapes, "dead": (self.dead,)}

    def gradient(self, params, x, y, grad, **more):
        grad["dead"][:] = self.slope * len(x)
        return super().gradient(params, x, y, grad, **more)


def trained(**more):
    return mpiddl.train(WithDeadParameters((64, 64, 10)), "digits", strategy="ddc-asgd", optimiser="nesterov", simulate=9,
                        batch=64, rate=0.02, quiet=True, **more)


def live(result):
    return np.concatenate([array.ravel() for name, array in result.params.items() if name != "dead"])


if __name__ == "__main__":
    print(f"{'dead':>8} {'gradient':>9} {'distance after 100 steps':>25} {'test accuracy':>14}")
    for WithDeadParameters.slope in (0.0, 1e-8):
        for WithDeadParameters.dead in (1, 5_000, 50_000, 500_000):
            found = live(trained(epochs=10, max_steps=100))
            if (WithDeadParameters.dead, WithDeadParameters.slope) == (1, 0.0):
                without = found
            away = np.linalg.norm(found - without) / np.linalg.norm(without)
            accuracy = trained(epochs=10).summary["test_accuracy"]
            print(f"{WithDeadParameters.dead:8} {WithDeadParameters.slope:9.0e} {away:25.1e} {accuracy:14.4f}", flush=True)
