"""Asynchronous SGD with a parameter server: one-sided where that works, two-sided elsewhere.

The server treats each gradient by a rule (`mpiddl.strategies.server.rule`). Laws, costs and sources are those of the two forms,
`mpiddl.strategies.server.one_sided` and `mpiddl.strategies.server.two_sided`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpiddl.errors import CommError, UsageError
from mpiddl.strategies.base import Placement, Strategy
from mpiddl.strategies.server.one_sided import OneSided
from mpiddl.strategies.server.one_sided_check import trouble
from mpiddl.strategies.server.rule import ONE_SIDED, TWO_SIDED, Rule
from mpiddl.strategies.server.two_sided import TwoSided
from mpiddl.transport.comm import Comm


@dataclass(frozen=True, repr=False)
class ParameterServer(Strategy):
    """A parameter server that treats gradients by ``rule``."""

    rule: Rule
    replicated = False
    lockstep = False

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule):
            raise UsageError(f"rule: got {self.rule!r}, expected a rule such as mpiddl.strategies.ASGD()")
        object.__setattr__(self, "optimisers", self.rule.optimisers)

    def __repr__(self) -> str:
        return repr(self.rule)

    def placement(self, shards: int, rank: int, size: int) -> Placement:
        return TwoSided(self.rule).placement(shards, rank, size)

    def resolve(self, comm: Comm) -> tuple[Strategy, str]:
        """Choose one-sided if ranks are processes and the trial succeeds, unless the user asks for two-sided.

        Raises
        ------
        UsageError
            On every rank: too many servers for the number of ranks.
        CommError
            On every rank: the user asks for one-sided, and it does not work here.
        """
        rule = self.rule
        bounded = "the bound needs a server that delays workers ahead of the others" if rule.bound >= 0 else ""
        why = "" if rule.communication == TWO_SIDED else bounded or trouble(comm)
        if why and rule.communication == ONE_SIDED:
            raise CommError(f"communication: got one-sided, but {why}; expected two-sided, or auto, which uses two-sided here")
        if rule.communication == TWO_SIDED or why:
            chosen: Strategy = TwoSided(replace(rule, communication=TWO_SIDED, servers=rule.serving))
        else:
            chosen = OneSided(replace(rule, communication=ONE_SIDED, servers=rule.servers or comm.size))
        chosen.check(comm.size)
        return chosen, f"parameter server: two-sided, since {why}" if why and comm.processes else ""
