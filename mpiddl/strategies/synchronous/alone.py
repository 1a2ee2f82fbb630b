"""One rank without communication: the reference for all other strategies.

Cost: nothing. Source: Robbins & Monro 1951, doi:10.1214/aoms/1177729586.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddl.errors import UsageError
from mpiddl.strategies.base import Strategy


@dataclass(frozen=True)
class Alone(Strategy):
    """Train on one rank without communication."""

    sums_gradients = True
    sums = False

    def check(self, size: int) -> None:
        if size != 1:
            raise UsageError(f"strategy: got 'alone' on {size} ranks, expected one rank; try 'allreduce' or 'local-sgd'")
