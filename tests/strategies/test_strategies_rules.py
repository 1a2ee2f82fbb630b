"""Update rules of parameter servers as values: rules of a user's own, and what is said of those that make no sense."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from harness.tiers import more

import mpiddl
from mpiddl.errors import UsageError
from mpiddl.strategies import ASGD, Strategy, make_strategy, spelled
from mpiddl.strategies.server.rule import TAKEN, Rule

pytestmark = pytest.mark.no_mpi


@dataclass(frozen=True)
class Damped(Rule):
    """Takes less of a late gradient, and keeps how much of all gradients it has taken."""

    power: float = 1.0

    def arrays(self, workers, like, layers):
        return {"taken": np.zeros(2)}

    def correct(self, state, push):
        share = 1 / (1 + push.delay) ** self.power
        state["taken"] += (share, 1)
        return share


class Own(Rule):
    def __init__(self, power=2.0):
        super().__init__()
        object.__setattr__(self, "power", power)


class Keeping(Rule):
    kept: object = None

    def arrays(self, workers, like, layers):
        return self.kept


class Mine(Strategy):
    """A strategy that has a rule, for reasons of its own."""

    rule = ASGD()


def trained(rule, comm=None, **more):
    return mpiddl.train("softmax", "digits", strategy=rule, quiet=True, epochs=1, rate=0.05, comm=comm, **more)


def test_a_rule_of_a_users_own_is_run_by_a_parameter_server():
    plain, damped = (trained(rule, simulate=4).summary for rule in (Damped(power=0.0), Damped(power=1.0)))
    assert plain["test_accuracy"] > damped["test_accuracy"] > 0.3  # in one epoch, smaller steps learn less
    assert "Damped(servers=1, communication='two-sided', power=1.0)" in damped["strategy"]
    assert trained(f"{__name__}:Damped:power=0.5", simulate=3).summary["test_accuracy"] > 0.3


@pytest.mark.mpi
def test_it_runs_one_sided_too(comm):
    for way in ("one-sided", "two-sided")[: comm.size]:
        result = trained(Damped(communication=way, power=0.5), comm)
        assert result.summary["test_accuracy"] > 0.3


def test_a_constructor_of_its_own_is_refused():
    with pytest.raises(UsageError, match="rule: got Own with a constructor of its own, expected a dataclass whose fields"):
        Own()


TAKEN_ONES = [{name: np.zeros(1)} for name in sorted(TAKEN)]


@pytest.mark.mpi
@pytest.mark.parametrize("kept", [{"count": 1.0}, {"list": [1, 2]}, {"moment.velocity": np.zeros(1)}, TAKEN_ONES[0],
                                  *map(more, TAKEN_ONES[1:])], ids=lambda kept: next(iter(kept)))  # fmt: skip
def test_what_a_rule_may_keep(comm, monkeypatch, kept):
    monkeypatch.setattr(Keeping, "kept", kept)
    for way in ("one-sided", "two-sided")[: comm.size]:
        with pytest.raises(UsageError, match=f"rule Keeping: arrays: got '{next(iter(kept))}' of type .*, expected numpy"):
            trained(Keeping(communication=way), comm)


def test_a_strategy_that_has_a_rule_is_no_server():
    assert "Mine" in spelled(Mine()) and spelled(make_strategy(ASGD())) == "asgd"
