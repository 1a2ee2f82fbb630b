"""Gossip by a schedule: rounds that are close together at the beginning of a run and rare at its end.

Of ``share`` T rounds in T steps, the part 1 - (1 - t/T)^power lies in the first t steps: power 1 is a fixed period, with 2
there are twice as many rounds a step at the beginning, falling linearly to none, with 3 three times as many. Where that would
be more than one a step there is one in each of the first steps, and as said in those that remain.
Cost: as `mpiddl.strategies.gossip`, for a given share of the steps.
Source: that an adaptive trigger amounts to such a schedule, and so has to be better than one; the form is ours. That the period
is to grow as the learning rate decays, Gu et al., ICLR 2024, arXiv:2310.14423 (there with its inverse square). At a rate that
stays AdaComm has it fall: Wang and Joshi, MLSys 2019, arXiv:1810.08313.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddl.errors import UsageError
from mpiddl.strategies.gossip import Gossip


@dataclass(frozen=True, repr=False)
class GossipScheduled(Gossip):
    """Gossip in ``share`` of the steps (0 to 1), more of them early by ``power`` (1 or more); the period is not looked at."""

    share: float = 0.08
    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1:
            raise UsageError(f"share: got {self.share}, expected a part of the steps, 0 to 1")
        if not 1 <= self.power < float("inf"):
            raise UsageError(f"power: got {self.power}, expected 1 or more")

    def rounds(self, done: int, steps: int) -> int:
        dense = max(self.share * self.power - 1, 0) / (self.power - 1) if self.power > 1 else 0.0  # part with one in each
        if done <= dense * steps:
            return done
        part = 1 - ((1 - done / steps) / (1 - dense)) ** self.power
        return int((dense + (self.share - dense) * part) * steps + 1e-9)  # 0.1 * 30 are 3, whatever floats say
