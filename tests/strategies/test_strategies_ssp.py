"""Bounded staleness: nobody is further ahead than that, nobody waits for ever, and what it is at both ends."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from harness.short_runs import JOB, distance, weights

import mpiddl
from mpiddl.errors import UsageError
from mpiddl.strategies import ASGD, SSP, Replica, Step, make_strategy
from mpiddl.strategies.server.two_sided import TwoSided
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

STEPS = 20


def simulated(strategy, workers, **more):
    settings = {**JOB, "optimiser": "nesterov", "rate": 0.01, "strategy": strategy, **more}
    return mpiddl.train("mlp", "digits", simulate=workers + make_strategy(strategy).rule.serving, **settings)


def stepped(rule, seconds, meet=0, leaves=None):
    """Workers that take so many seconds a step push ones; worker ``leaves`` makes three steps.

    Returns the steps of each; how far who began a step was ahead; the parameters; how often all have met.
    """
    strategy, workers, served, leads, met = TwoSided(rule), len(seconds), {}, [], []

    def ahead(rank, state):
        return state["counts"][rank] - min(count for worker, count in enumerate(state["counts"]) if worker not in state["left"])

    def program(comm):
        replica = Replica(np.zeros(8), {}, lambda params, grad, *rest: params.__iadd__(grad))
        state, done, over = strategy.init(comm, replica), 0, False
        if comm.rank >= workers:
            served[comm.rank] = state
        comm.Barrier()
        while not over and not (comm.rank == leaves and done == 3):
            if comm.rank < workers:
                leads.append(max(ahead(comm.rank, state) for state in served.values()))
                comm.compute(seconds[comm.rank])
            combined = strategy.combine(comm, state, np.ones(8), replica, Step(0, 1, workers, 1.0, STEPS, meet))
            state, done, over = combined.state, done + 1, combined.stop
            if combined.meet:
                comm.Barrier()
                assert len({state["version"] for state in served.values()}) == 1  # nothing is on its way
                met.append(comm.rank)
                comm.Barrier()
        strategy.finish(comm, state, replica)
        return done, replica.params.copy()

    found = virtual.run(workers + rule.serving, program, wire=virtual.Wire(0.01))
    return [done for done, _ in found[:workers]], leads, found[0][1], met.count(0)


@pytest.mark.parametrize("meet", [0, 3])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("bound", [0, 1, 4])
def test_nobody_is_ever_further_ahead(bound, servers, meet):
    done, leads, params, met = stepped(SSP(servers, bound=bound), [1.0, 7.0, 1.3, 2.0], meet)
    assert max(leads) == bound
    assert (params == 4 * STEPS).all() and (met > 2) == bool(meet)
    assert max(done) - min(done) <= bound + 1  # the last gradient of some finds the run over


def test_without_a_bound_that_binds_they_are():
    _, leads, *_ = stepped(SSP(bound=1000), [1.0, 7.0, 1.3, 2.0])
    assert max(leads) > 10


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("leaves", [0, 1])
def test_one_who_leaves_blocks_nobody(bound, leaves):
    done, _, params, _ = stepped(SSP(bound=bound), [1.0, 7.0, 1.3], meet=4, leaves=leaves)
    assert done[leaves] == 3 and (params == 3 * STEPS).all()
    others = [count for worker, count in enumerate(done) if worker != leaves]
    assert min(others) > STEPS


@pytest.mark.parametrize("servers", [1, 2])
def test_a_bound_that_nobody_reaches_is_none(servers):
    given = {"slow": "1:3,4:2", "jitter": 0.3, "validation": 0.0, "max_steps": 25}
    bounded, free = (simulated(strategy, 5, **given) for strategy in (SSP(servers, bound=10**6), ASGD(servers)))
    assert weights(bounded).tobytes() == weights(free).tobytes()
    assert bounded.summary["staleness"] == free.summary["staleness"]


def test_bound_zero_is_bulk_synchronous():
    given = {"optimiser": "sgd", "schedule": "constant", "batch": 64, "max_steps": 15, "slow": "2:4", "jitter": 0.5}
    bounded = simulated("ssp:bound=0", 4, rate=0.01, **given)
    whole = mpiddl.train("mlp", "digits", simulate=4, strategy="allreduce", **{**JOB, **given, "rate": 0.04})
    assert distance(weights(bounded), weights(whole)) < 1e-12
    assert bounded.summary["staleness"]["histogram"] == {str(delay): 15 for delay in range(4)}


def test_one_worker_is_the_optimiser_alone():
    alone = mpiddl.train("mlp", "digits", **{**JOB, "optimiser": "nesterov", "rate": 0.01, "strategy": "alone"})
    assert weights(simulated("ssp:bound=0", 1)).tobytes() == weights(alone).tobytes()


def test_a_straggler_is_waited_for_and_delays_are_bounded():
    free, bounded = (simulated(strategy, 4, slow="3:8", jitter=0.2, max_steps=25) for strategy in ("asgd", "ssp:bound=2"))
    assert bounded.summary["staleness"]["longest"] <= (2 * 2 + 1) * 3 < free.summary["staleness"]["longest"]
    assert bounded.summary["seconds"] > 2 * free.summary["seconds"]


@pytest.mark.parametrize("strategy", ["ssp:bound=0", "ssp:bound=2", "ssp:bound=1,servers=2"])
def test_a_run_that_was_cut_has_the_bits_of_one_that_was_not(tmp_path, strategy):
    given = {"slow": "1:3", "jitter": 0.3, "checkpoint_every": 6, "max_steps": 24, "out": tmp_path}
    straight = simulated(strategy, 4, **given)
    kept = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert len(kept) == 3
    for later in kept[1:]:
        shutil.rmtree(later)  # as if the job had been killed after this checkpoint
    resumed = simulated(strategy, 4, resume=True, **given)
    assert weights(resumed).tobytes() == weights(straight).tobytes()
    assert resumed.summary["staleness"] == straight.summary["staleness"]


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("servers", [1, 2])
def test_on_real_ranks(comm, servers):
    workers = comm.size - servers
    result = mpiddl.train("mlp", "digits", comm=comm, strategy=f"ssp:bound=1,servers={servers}", slow="0:3", **JOB)
    assert result.summary["strategy"] == f"SSP(servers={servers}, communication='two-sided', bound=1)"
    delays = result.summary["staleness"]
    assert delays["pushes"] == result.summary["steps"] * workers and delays["longest"] <= 3 * (workers - 1)
    assert len(set(comm.allgather(weights(result).tobytes()))) == 1


@pytest.mark.mpi(min_size=3)
def test_a_time_limit_ends_all(comm, ticking):
    given = {**JOB, "epochs": 10_000, "max_seconds": 0.5, "slow": "0:5"}
    result = mpiddl.train("mlp", "digits", comm=comm, strategy="ssp:bound=0", **given)
    assert result.summary["ended"] == "0.5 s are over" and result.summary["staleness"]["pushes"] > 0


@pytest.mark.parametrize(("strategy", "message"), [
    ("ssp:bound=-1", r"bound: got -1, expected a number of steps, 0 or more"),
    ("ssp:communication=one-sided", "communication: got one-sided, which cannot keep the bound of ssp"),
])
def test_what_makes_no_sense(strategy, message):
    with pytest.raises(UsageError, match=message):
        make_strategy(strategy)
