"""DANA: each worker has its own Nesterov momentum.

v_m <- mu v_m + g, w <- w - eta (g + mu v_m) for worker m. The pulled parameters then predict the effect of all workers'
momenta.
Cost: as `parameter_server`; a server holds the moments once for each worker.
Source: Hakimi et al. 2019, arXiv:1907.11612, DANA-Slim. Law: with one worker it is Nesterov's momentum.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddl.strategies.server.two_sided import ParameterServer


@dataclass(frozen=True)
class DANA(ParameterServer):
    """Parameter server with a Nesterov momentum for each worker."""

    own_moments = True
    optimisers = ("nesterov",)
