"""Stale synchronous parallel: asynchronous SGD in which no worker is more than ``bound`` steps ahead of the slowest.

With bound 0 it is bulk-synchronous: all compute on the same parameters, and the updates are applied one after the other. Cost:
`parameter_server`, always two-sided, since a rank has to serve that holds up those that are ahead.
Source: Ho et al., NIPS 2013, "More effective distributed ML via a stale synchronous parallel parameter server"; see
`mpiddl.strategies.bound`.
Laws: with a bound that nobody reaches it is `asgd`, bit for bit, between two meetings; with bound 0, `sgd` and a constant rate
it is `allreduce` at as many times the rate as there are workers, to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddl.errors import UsageError
from mpiddl.strategies.asgd import ASGD
from mpiddl.strategies.parameter_server import ONE_SIDED


@dataclass(frozen=True)
class SSP(ASGD):
    """`ASGD` in which a worker is at most ``bound`` steps ahead."""

    bound: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bound < 0:
            raise UsageError(f"bound: got {self.bound}, expected a number of steps, 0 or more (asgd has no bound)")
        if self.communication == ONE_SIDED:
            raise UsageError("communication: got one-sided for ssp, expected two-sided or auto, which keep the bound")
