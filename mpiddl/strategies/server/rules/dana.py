"""DANA: each worker has its own Nesterov momentum.

v_m <- mu v_m + g, w <- w - eta (g + mu v_m) for worker m. The pulled parameters then predict the effect of all workers'
momenta.
Cost: as with any rule; a server holds the moments once for each worker.
Source: Hakimi et al. 2019, arXiv:1907.11612, DANA-Slim. Law: with one worker it is Nesterov's momentum.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddl.strategies.server.rule import Rule


@dataclass(frozen=True)
class DANA(Rule):
    """Rule with a Nesterov momentum for each worker."""

    needs_pulled = False
    own_moments = True
    optimisers = ("nesterov",)
