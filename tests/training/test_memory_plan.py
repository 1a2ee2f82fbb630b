"""``mpiddl plan-memory``: what crosses between ranks, who makes it, where it lies, what is copied."""

from __future__ import annotations

import pytest

from mpiddl.layout import rank_shards
from mpiddl.strategies import Placement, Strategy, make_strategy
from mpiddl.training.memory_plan import crossing, plan, text_of
from mpiddl.training.request import Request
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

OWN = '''
import numpy as np

class Own:
    """A linear model of the user's."""

    def __init__(self, features, outputs):
        self.shapes = {"w": (features, outputs), "b": (outputs,)}

    def init(self, params, rng):
        params["w"][:] = 0
        params["b"][:] = 0

    def predict(self, params, x):
        return x @ params["w"] + params["b"]

    def gradient(self, params, x, y, grad):
        p = np.exp(self.predict(params, x))
        p /= p.sum(1, keepdims=True)
        loss = -np.log(p[np.arange(len(y)), y]).sum()
        p[np.arange(len(y)), y] -= 1
        grad["w"][:] = x.T @ p
        np.sum(p, 0, out=grad["b"])
        return float(loss)
'''


def planned(strategy, nodes=(0, 1), **settings):
    request = Request(quiet=True, settings={"data": "digits", "batch": 60, "strategy": strategy, **settings})
    found = virtual.run(len(nodes), lambda comm: plan(comm, request), nodes)
    assert all(each == found[0] for each in found)
    return found[0]


def test_our_network_copies_nothing():
    found = planned("two-step", hidden=(32,))
    assert [(row.tensor, row.nbytes, row.crosses) for row in found.rows] == [
        ("weight1", 4 * 64 * 32, "gradient"), ("bias1", 128, "gradient"), ("weight2", 1280, "gradient"),
        ("bias2", 40, "gradient")]
    assert {(row.made, row.placed, row.copies, row.saved) for row in found.rows} == {
        ("in place by compiled code", "shared memory of the node", 0, 2)}
    assert not found.advice and "The model copies 0 bytes in each step." in text_of(found)


@pytest.mark.parametrize(("strategy", "made", "placed"), [
    ("asgd:communication=two-sided", "the rule of the servers", "memory of the servers"),
    ("gossip", "the update", "memory of the rank"),
])
def test_parameters_that_cross(strategy, made, placed):
    found = {(row.made, row.placed) for row in planned(strategy, nodes=(0, 1, 2)).rows if row.crosses == "parameters"}
    assert found == {(made, placed)}


def test_a_model_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "planned_nets.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    found = planned("two-step", model="planned_nets:Own")
    weight, bias = found.rows
    line = next(number for number, text in enumerate(OWN.splitlines(), 1) if "x.T @ p" in text)
    assert weight.made == f"planned_nets.py:{line}, copied in planned_nets.py:{line}"
    assert (weight.copies, weight.saved, bias.copies, bias.saved) == (1, 1, 0, 2)
    assert bias.made == f"in place by planned_nets.py:{line + 1}"
    assert found.advice == [f"w: planned_nets.py:{line} copies 2,560 bytes for each gradient; to avoid that, name the target, "
                            "such as out=grad['w']"]
    several = planned("coded", nodes=(0, 1, 2, 3), model="planned_nets:Own")
    assert several.gradients == several.rows[0].copies == 3


class FirstServes(Strategy):
    """Rank 0 has no rows."""

    def placement(self, shards, rank, size):
        return Placement(range(0)) if rank == 0 else Placement(rank_shards(shards, size - 1, rank - 1))

    sums = True


def test_a_rank_that_computes_nothing_is_not_asked():
    request = Request(quiet=True, strategy=FirstServes(), settings={"data": "digits", "batch": 60})
    found = virtual.run(3, lambda comm: plan(comm, request), (0, 1, 2))
    assert found[0].rows and all(row.made == "in place by compiled code" for row in found[0].rows)


@pytest.mark.filterwarnings("ignore:verbs")
@pytest.mark.parametrize(("strategy", "crosses"), [
    ("ring", {"gradient"}), ("gossip", {"parameters"}), ("asgd:communication=two-sided", {"gradient", "parameters"}),
    ("ring:transport=verbs", {"gradient"}), ("auto", {"gradient"}), ("local-sgd", {"parameters"}),
    ("delayed", {"gradient"}), ("gossip:pace=own", {"parameters"}), ("coded-sum", {"gradient"}),
])  # fmt: skip
def test_what_strategies_exchange(strategy, crosses):
    assert set(crossing(make_strategy(strategy))) == crosses
    assert {row.crosses for row in planned(strategy, optimiser="momentum").rows} == crosses


def test_the_command(command, tmp_path, mpirun):
    done = command("mpiddl", "plan-memory", "--data", "digits", "--strategy", "two-step", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("strategy: TwoStep(") and "in place by compiled code" in done.stdout
    assert not list(tmp_path.iterdir())
    alone = command("mpiddl", "plan-memory", "--data", "digits", "--strategy", "twostep", cwd=tmp_path)
    assert alone.returncode == 2 and "strategy: got 'twostep'" in alone.stderr
    several = mpirun(2, "mpiddl", "plan-memory", "--data", "digits", "--strategy", "alone")
    assert several.returncode == 2 and "expected one rank" in several.stderr
