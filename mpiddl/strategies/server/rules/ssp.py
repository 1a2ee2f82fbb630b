"""Stale synchronous parallel: asynchronous SGD in which no worker is more than ``bound`` steps ahead of the slowest.

With bound 0 it is bulk-synchronous: all workers compute at the same parameters, and the updates are applied one after the
other.
Cost: as with any rule, always two-sided, because a serving rank must make fast workers wait.
Source: Ho et al., NIPS 2013, "More effective distributed ML via a stale synchronous parallel parameter server"; see
`mpiddl.strategies.server.staleness_bound`.
Laws: with a bound that no worker reaches it is `asgd`, bit for bit, between two meetings; with bound 0, `sgd` and a constant
learning rate it is `allreduce` with that rate times the number of workers, to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddl.errors import UsageError
from mpiddl.strategies.server.rule import ONE_SIDED
from mpiddl.strategies.server.rules.asgd import ASGD


@dataclass(frozen=True)
class SSP(ASGD):
    """`ASGD` in which a worker is at most ``bound`` steps ahead."""

    bound: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bound < 0:
            raise UsageError(f"bound: got {self.bound}, expected a number of steps, 0 or more (strategy asgd has no bound)")
        if self.communication == ONE_SIDED:
            raise UsageError("communication: got one-sided, which cannot keep the bound of ssp, expected two-sided or auto")
