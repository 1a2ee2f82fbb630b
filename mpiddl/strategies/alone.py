"""One rank, no communication: what every other strategy is compared with.

Cost: nothing. Source: Robbins & Monro 1951, doi:10.1214/aoms/1177729586.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddl.errors import UsageError
from mpiddl.strategies.base import Strategy


@dataclass(frozen=True)
class Alone(Strategy):
    """The identity in every function."""

    sums_gradients = True

    def check(self, size: int) -> None:
        if size != 1:
            raise UsageError(f"strategy: got 'alone' on {size} ranks, expected one rank; try 'allreduce' or 'local-sgd'")
