"""DANA: each worker has a momentum of its own, and looks ahead along it.

v_m <- mu v_m + g, w <- w - eta (g + mu v_m): with Nesterov's momentum for each worker the parameters that are pulled are where
the momenta of all workers will carry them. Cost: `parameter_server`; a server's moments once for each worker.
Source: Hakimi et al. 2019, arXiv:1907.11612, DANA-Slim. Law: with one worker it is Nesterov's momentum.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddl.strategies.parameter_server import ParameterServer


@dataclass(frozen=True)
class DANA(ParameterServer):
    """Momentum of each worker's own."""

    own_moments = True
    optimisers = ("nesterov",)
