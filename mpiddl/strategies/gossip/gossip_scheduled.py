"""Scheduled gossip: frequent rounds at the start of a run, rare rounds at its end.

T steps have ``share`` T rounds. The first t steps have the fraction 1 - (1 - t/T)^power of them. Power 1 is a fixed period.
With power 2 the rate of rounds starts at twice the average and falls linearly to zero; with power 3 it starts at three times
the average. If this gives more than one round per step, each of the first steps has one round, and the others follow the
formula.
Cost: as `mpiddl.strategies.gossip.gossip`, for a given share of the steps.
Source: ours, as a reference for adaptive triggers, which produce similar schedules. A period that grows as the learning rate
decays: Gu et al., ICLR 2024, arXiv:2310.14423 (with the inverse square). With a constant learning rate AdaComm shortens the
period: Wang and Joshi, MLSys 2019, arXiv:1810.08313.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddl.errors import UsageError
from mpiddl.strategies.gossip.gossip import Gossip


@dataclass(frozen=True, repr=False)
class GossipScheduled(Gossip):
    """Gossip in a ``share`` of the steps (0 to 1); a larger ``power`` (1 or more) makes it earlier. Ignores ``period``."""

    share: float = 0.08
    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1:
            raise UsageError(f"share: got {self.share}, expected a share of the steps, from 0 to 1")
        if not 1 <= self.power < float("inf"):
            raise UsageError(f"power: got {self.power}, expected 1 or more")

    def rounds(self, done: int, steps: int) -> int:
        dense = max(self.share * self.power - 1, 0) / (self.power - 1) if self.power > 1 else 0.0  # with one round each
        if done <= dense * steps:
            return done
        part = 1 - ((1 - done / steps) / (1 - dense)) ** self.power
        return int((dense + (self.share - dense) * part) * steps + 1e-9)  # so that 0.1 * 30 gives 3 in spite of rounding
