"""Staleness-aware asynchronous SGD: the learning rate of a gradient is divided by its delay.

w <- w - eta / max(tau, 1) g, with the optimiser's momentum if it has one. The factor belongs to the learning rate, not to the
gradient: it also acts with Adam, and on the weight decay. Cost: as with any rule.
Source: Zhang et al., IJCAI 2016, arXiv:1511.05950. Law: with delays of 0 and 1 it is `asgd`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpiddl.strategies.server.push import Push
from mpiddl.strategies.server.rule import Rule


@dataclass(frozen=True)
class StalenessAware(Rule):
    """Rule that divides the learning rate by the delay."""

    needs_pulled = False

    def correct(self, state: dict[str, Any], push: Push) -> float:
        push.rate /= max(push.delay, 1)
        return 1.0
