"""Asynchronous SGD: the optimiser's step with every gradient in order of arrival, for any delay.

With the optimiser `sgd` it is w <- w - eta g; with `momentum` all workers share one velocity. Cost: as with any rule.
Source: Dean et al., NIPS 2012, section 4.1 (downpour SGD, a push and a pull a step).
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddl.strategies.server.rule import Rule


@dataclass(frozen=True)
class ASGD(Rule):
    """Rule that applies gradients without correction or damping."""

    needs_pulled = False
