"""Gossip at ranks' own pace: nothing is lost, nobody waits, whoever is slow, gone for a while, gone for good or done."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest
from harness.short_runs import JOB, distance, on_virtual_ranks, weights

import mpiddl
from mpiddl.errors import UsageError
from mpiddl.strategies import Elastic, ElasticAdaptive, Gossip, GossipAdaptive, LocalSGD, Replica, Step, chain, make_strategy
from mpiddl.strategies.gossip.asynchronous import OwnPace
from mpiddl.strategies.gossip.elastic_asynchronous import ElasticOwnPace
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

SIZE = 30
RULES = [Gossip("ring"), Gossip("complete"), Gossip("matching", period=2), Gossip("exponential", "push"),
         Gossip("complete", "push", period=3), Gossip("ring", "pull"), GossipAdaptive(theta=0.2),
         GossipAdaptive("complete", "push", traffic=0.3), Gossip(np.full((4, 4), 0.25))]  # fmt: skip
NAMES = ["gossip:pace=own", "gossip:pace=own,direction=push,graph=complete", "gossip:pace=own,outer=0.3,period=3",
         "gossip:pace=own,direction=pull,graph=ring,period=2", "gossip-adaptive:pace=own,theta=0.02",
         "gossip-scheduled:pace=own,share=0.3", "elastic:pace=own,period=2",
         "elastic-adaptive:pace=own,theta=0.02"]  # fmt: skip


def add(params, grad, moments, rate, scale, step):
    params += scale * grad


def given(rank, step):
    return np.random.default_rng([rank, step]).standard_normal(SIZE)


def gone_through(comm, rule, steps, seconds=None, meet=0, leaves=None):
    """A rank's end: parameters, its weight, its steps, how often all have met and the seconds it has taken."""
    strategy, replica = OwnPace(rule), Replica(given(comm.rank, 0), {}, add)
    state, met, began = strategy.init(comm, replica), 0, comm.now()
    for index in range(steps if comm.rank != leaves else 3):
        if seconds:
            comm.compute(seconds[comm.rank])
        step = Step(index, 1, comm.size, 1.0, steps, meet)
        combined = strategy.combine(comm, state, given(comm.rank, index + 1), replica, step)
        state = combined.state
        if combined.meet:
            met += 1
            assert abs(sum(comm.allgather(float(state["weights"][0]))) - comm.size) < 1e-12  # nothing is on its way
    taken = comm.now() - began
    strategy.finish(comm, state, replica)
    return replica.params, state, met, taken


def mean_of(size, steps, leaves=None):
    """Of all that ranks have begun with and been given."""
    each = [sum(given(rank, step) for step in range((3 if rank == leaves else steps) + 1)) for rank in range(size)]
    return np.mean(each, axis=0)


@pytest.mark.parametrize("leaves", [None, 0, 2])
@pytest.mark.parametrize("meet", [0, 5])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_nothing_is_lost_at_any_pace(rule, meet, leaves):
    seconds = [1.0, 7.3, 1.1, 2.0]
    found = virtual.run(4, lambda comm: gone_through(comm, rule, 23, seconds, meet, leaves), wire=virtual.Wire(0.4, 1e4))
    assert len({params.tobytes() for params, *_ in found}) == 1
    if rule.direction == "symmetric":
        np.testing.assert_allclose(found[0][0], mean_of(4, 23, leaves), atol=1e-12)
    assert sum(state["weights"][0] for _, state, *_ in found) == pytest.approx(4)
    assert {met for *_, met, _ in found} == {4 if meet and leaves is None else 0}
    if not meet:
        own = [second * (3 if rank == leaves else 23) for rank, second in enumerate(seconds)]
        assert [taken for *_, taken in found] == pytest.approx(own)
    assert sum(state["exchanges"] for _, state, *_ in found) > 4


@pytest.mark.parametrize("rule", [Elastic(2), Elastic(1, 0.25), ElasticAdaptive(theta=0.2)], ids=repr)
@pytest.mark.parametrize("slow", [0, 2])
def test_elastic_keeps_the_sum_of_ranks_and_centre(rule, slow):
    def program(comm):
        strategy, replica, sums = ElasticOwnPace(rule), Replica(given(comm.rank, 0), {}, add), []
        state = strategy.init(comm, replica)
        for index in range(20):
            comm.compute(5.3 if comm.rank == slow else 1.0)
            combined = strategy.combine(comm, state, given(comm.rank, index + 1), replica, Step(index, 1, 4, 1.0, 20, 5))
            if combined.meet:
                sums.append(replica.params + (state["centre"] if comm.rank == 0 else 0))
        strategy.finish(comm, state, replica)
        return sums, replica.params, state["exchanges"]

    found = virtual.run(4, program, wire=virtual.Wire(0.4))
    assert len({params.tobytes() for _, params, _ in found}) == 1 and all(exchanges > 3 for *_, exchanges in found)
    for number, total in enumerate(np.sum([sums for sums, *_ in found], axis=0)):
        np.testing.assert_allclose(total, 4 * mean_of(4, 5 * number + 5) + given(0, 0), atol=1e-10)


def test_elastic_of_one_rank_is_in_lockstep():
    own, together = (weights(on_virtual_ranks(1, make_strategy(f"elastic:period=3{pace}"))[0]) for pace in ("", ",pace=own"))
    assert distance(own, together) < 1e-12


@pytest.mark.parametrize("rule", RULES[3:5], ids=repr)
def test_pushes_keep_the_weighted_sum(rule):
    """With nothing given after the start the weighted mean is that of the beginning."""

    def program(comm):
        strategy, replica = OwnPace(rule), Replica(given(comm.rank, 0), {}, add)
        state = strategy.init(comm, replica)
        for index in range(20):
            comm.compute(1.0 + comm.rank)
            state = strategy.combine(comm, state, np.zeros(SIZE), replica, Step(index, 1, comm.size, 1.0, 20)).state
        strategy.finish(comm, state, replica)
        return replica.params

    found = virtual.run(5, program, wire=virtual.Wire(0.7))
    np.testing.assert_allclose(found[0], np.mean([given(rank, 0) for rank in range(5)], axis=0))


@pytest.mark.parametrize("seconds", [0.0, 0.9, 2.5])
@pytest.mark.parametrize("direction", ["symmetric", "pull"])
def test_an_answer_is_no_step_back(direction, seconds):
    """Where each step adds 1 to what a rank has, all have their steps in the end, however long messages take."""

    def program(comm):
        strategy, replica = OwnPace(Gossip("complete", direction)), Replica(np.zeros(1), {}, add)
        state = strategy.init(comm, replica)
        for index in range(100):
            comm.compute(1 + 0.1 * given(comm.rank, index)[0] ** 2)
            state = strategy.combine(comm, state, np.ones(1), replica, Step(index, 1, comm.size, 1.0, 100)).state
        strategy.finish(comm, state, replica)
        return replica.params[0]

    assert virtual.run(5, program, wire=virtual.Wire(seconds)) == pytest.approx([100.0] * 5, rel=0.06)


@pytest.mark.parametrize("seconds", [3.0, 12.0])
@pytest.mark.parametrize("rule", [*RULES[:6], Elastic(1), Gossip(outer=0.3), Gossip(direction="pull", outer=0.3)], ids=repr)
def test_late_answers_do_not_drive_ranks_apart(rule, seconds):
    def program(comm):
        strategy = ElasticOwnPace(rule) if isinstance(rule, Elastic) else OwnPace(rule)
        replica = Replica(given(comm.rank, 0), {}, add)
        state = strategy.init(comm, replica)
        for index in range(150):
            comm.compute(1.0 + 0.1 * comm.rank)
            state = strategy.combine(comm, state, given(comm.rank, index), replica, Step(index, 1, 4, 1.0, 150)).state
        apart = replica.params.copy()
        strategy.finish(comm, state, replica)
        return apart

    found = np.array(virtual.run(4, program, wire=virtual.Wire(seconds)))
    alone = np.sqrt(150 * SIZE)  # a random walk's
    assert np.linalg.norm(found - found.mean(axis=0), axis=1).max() < 0.6 * alone


@pytest.mark.parametrize("direction", ["symmetric", "pull", "push"])
def test_traffic_is_what_was_asked_for(direction):
    rule = GossipAdaptive("complete", direction, traffic=0.1)
    found = virtual.run(4, lambda comm: gone_through(comm, rule, 200, [1.0, 1.7, 1.1, 2.0]), wire=virtual.Wire(0.4))
    assert [int(state["moves"][0]) for _, state, *_ in found] == pytest.approx([20] * 4, abs=2)


def test_one_after_the_other_on_the_same_ranks():
    def program(comm):
        return [gone_through(comm, Gossip("complete"), 10, [1.0, 7.0, 1.0], meet=4)[::2] for _ in range(3)]

    for runs in virtual.run(3, program, wire=virtual.Wire(0.4)):
        assert len({(params.tobytes(), met) for params, met in runs}) == 1 and runs[0][1] == 2


@pytest.mark.parametrize("members", [(Gossip(pace="own"), LocalSGD(4)), (LocalSGD(4), Gossip(pace="own"))], ids=repr)
def test_beside_others_it_is_refused(members):
    with pytest.raises(UsageError, match=r"chain: got the asynchronous strategy OwnPace.* together with others"):
        on_virtual_ranks(2, chain(*members))


@pytest.mark.mpi
@pytest.mark.parametrize("rule", RULES[:8], ids=repr)
def test_nothing_is_lost_on_real_ranks(comm, link, rule):
    if rule.graph == "matching" and comm.size % 2:
        rule = Gossip("complete", period=2)
    params, state, met, _ = gone_through(link, rule, 200, meet=40)
    assert len(set(comm.allgather(params.tobytes()))) == 1 and met == 4
    if rule.direction == "symmetric":
        np.testing.assert_allclose(params, mean_of(comm.size, 200), atol=1e-10)
    assert sum(comm.allgather(float(state["weights"][0]))) == pytest.approx(comm.size)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("direction", ["symmetric", "pull", "push"])
def test_large_models_go_round_while_a_rank_leaves(comm, link, direction):
    """Of 8 MB, beyond what a library sends before the other one has asked for it."""
    strategy, replica = OwnPace(Gossip("complete", direction)), Replica(np.full(1_000_000, float(comm.rank)), {}, add)
    state = strategy.init(link, replica)
    for index in range(3 if comm.rank == 0 else 12):
        state = strategy.combine(link, state, np.zeros(1_000_000), replica, Step(index, 1, comm.size, 1.0, 12, 4)).state
    strategy.finish(link, state, replica)
    assert (replica.params == replica.params[0]).all()
    if direction != "pull":
        assert replica.params[0] == pytest.approx((comm.size - 1) / 2)


@pytest.mark.mpi
@pytest.mark.parametrize("name", NAMES)
def test_training_on_real_ranks(comm, name):
    result = mpiddl.train("mlp", "digits", comm=comm, strategy=name, **JOB)
    assert len(set(comm.allgather(weights(result).tobytes()))) == 1
    least = 0.3 if "push" in name else 0.6  # models pushed at ranks that are not at their turn are mixed late, and lose steps
    assert result.summary["test_accuracy"] > least and result.summary["steps"] > 30


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("conditions", [{"slow": "0:4"}, {"drop": "1:5:15"}, {"drop": "0:7"}, {"drop": "1:7", "slow": "0:3"},
                                        {"max_seconds": 0.02}])  # fmt: skip
def test_slow_lost_and_late_ranks_hold_up_nobody(comm, conditions, ticking):
    result = mpiddl.train("mlp", "digits", comm=comm, strategy="gossip:pace=own,graph=complete", **JOB, **conditions)
    assert len(set(comm.allgather(weights(result).tobytes()))) == 1
    if "max_seconds" in conditions:
        assert result.summary["steps"] < 10  # of 66
    else:
        assert result.summary["test_accuracy"] > 0.6


@pytest.mark.parametrize("name", NAMES)
def test_on_the_clock_it_repeats_its_bits_and_a_straggler_holds_up_nobody(name):
    settings = {**JOB, "strategy": name, "simulate": 5, "slow": "3:6", "jitter": 0.2, "validation": 0.0, "message_seconds": 0.1}
    first, again = mpiddl.train("mlp", "digits", **settings), mpiddl.train("mlp", "digits", **settings)
    assert weights(first).tobytes() == weights(again).tobytes()
    assert first.summary["test_accuracy"] > 0.6
    compute = [split["compute"] for split in first.summary["per_rank"]]
    assert compute[3] > 4 * max(compute[:3]) and first.summary["seconds"] < 1.01 * compute[3] + 1


def test_one_who_is_gone_for_a_while_is_passed_over():
    settings = {**JOB, "simulate": 4, "drop": "2:4:30", "validation": 0.0}
    result = mpiddl.train("mlp", "digits", strategy="gossip:pace=own,graph=complete", **settings)
    steps = result.summary["steps"]
    assert result.summary["exchanges"] > 1.2 * steps  # of rank 0: its own and those it was asked for
    assert result.summary["test_accuracy"] > 0.6


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_from_where_all_have_met(tmp_path, name, cut=12):
    settings = {**JOB, "simulate": 3, "slow": "1:2.5", "message_seconds": 0.1, "strategy": name, "out": tmp_path,
                "checkpoint_every": cut}
    straight = mpiddl.train("mlp", "digits", **settings, max_steps=40)
    for kept in sorted((tmp_path / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(kept)  # as if it had been killed after its first checkpoint
    resumed = mpiddl.train("mlp", "digits", **settings, max_steps=40, resume=True)
    assert weights(resumed).tobytes() == weights(straight).tobytes()


def test_with_one_rank_it_is_that_rank_alone():
    own, alone = (weights(on_virtual_ranks(1, make_strategy(name))[0]) for name in ("gossip:pace=own", "alone"))
    assert distance(own, alone) == 0


def test_a_lost_graph_is_told():
    with pytest.raises(UsageError, match="graph: got matching on 3 ranks"):
        on_virtual_ranks(3, Gossip("matching", pace="own"))


FAILING = """
import sys
from mpi4py import MPI
import mpiddl
from mpiddl.strategies import Gossip
from mpiddl.transport import comm


class Failing(Gossip):
    def rounds(self, done, steps):
        if done == 9 and MPI.COMM_WORLD.rank == 1:
            raise ValueError("before an exchange")
        return super().rounds(done, steps)


comm.GRACE_S = 0.3
mpiddl.train("mlp", "digits", strategy=Failing("ring", pace=sys.argv[1]), epochs=100_000, quiet=True)
"""


@pytest.mark.parametrize("pace", ["own", "together"])
@pytest.mark.more
def test_a_rank_that_is_lost_in_the_middle_of_exchanges_ends_the_job(mpirun, pace):
    done = mpirun(3, sys.executable, "-c", FAILING, pace)
    assert done.returncode != 0
    assert done.stderr.count("mpiddl: error on rank 1 of 3, the job ends") == 1
    assert done.stderr.count("ValueError: before an exchange") == 1
