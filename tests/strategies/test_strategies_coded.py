"""Strategies whose workers compute the same gradients: their steps, bits and bytes, and steps that nobody is late for."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from harness.short_runs import JOB, distance, on_virtual_ranks, weights
from harness.tiers import more, only

import mpiddl
from mpiddl.coding.loads import Load
from mpiddl.coding.placements import cyclic, replicated_groups
from mpiddl.errors import CommError, ConvergenceError, UsageError
from mpiddl.strategies.base import Combined, Replica, Step, Strategy
from mpiddl.strategies.chain import chain
from mpiddl.strategies.coded.calibration import Network, finished
from mpiddl.strategies.coded.coded import Coded
from mpiddl.strategies.coded.coded_sum import CodedSum
from mpiddl.transport import virtual

TWO, RINGS = "coded-sum:redundancy=2", "coded-sum:redundancy=2,transport=unicast"
MDS, MDS_RING = "coded-sum:redundancy=2,code=mds", "coded-sum:redundancy=2,code=mds,transport=unicast"
MDS_LATE = "coded-sum:redundancy=2,code=mds,stragglers=1"
SPECS = ["coded-sum", TWO, "coded-sum:redundancy=1", RINGS, MDS, MDS_RING, MDS_LATE, "coded-sum:code=mds",
         "multicast-allreduce", "coded", "coded:xor=1",
         "coded:turns=1,redundancy=1"]
SHARDS = 60
"""So that all blocks have as many."""

PARAMETERS = 64 * 64 + 64 + 64 * 10 + 10


def on_nodes(nodes, strategy, **settings):
    job = {**JOB, **settings}
    return virtual.run(len(nodes), lambda comm: mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, **job), nodes)


@functools.cache
def of_allreduce(nodes):
    return on_nodes(nodes, "allreduce", shards=SHARDS)[0]


@pytest.mark.no_mpi
@pytest.mark.parametrize("nodes", [
    more((0, 0)), more((0, 0, 0)), (0, 1, 2, 3), more((0, 0, 1, 1)), more((0, 0, 0, 1, 2, 2))], ids=str)
@pytest.mark.parametrize("strategy", SPECS)
def test_steps_of_allreduce_wherever_ranks_are(strategy, nodes):
    results = on_nodes(nodes, strategy, shards=SHARDS)
    assert len({weights(result).tobytes() for result in results}) == 1
    plain = of_allreduce(nodes)
    assert distance(weights(results[0]), weights(plain)) < (1e-6 if strategy == "coded" or "turns" in strategy else 1e-12)
    ours, theirs = ([line for line in found.history if "validation_loss" in line][-1] for found in (results[0], plain))
    assert ours["validation_accuracy"] == theirs["validation_accuracy"]
    assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"])


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("strategy", only({MDS_LATE, "coded"}, SPECS))
def test_steps_of_allreduce_on_real_ranks(comm, strategy):
    if comm.size == 1 and strategy.startswith("coded"):
        strategy = f"{strategy.partition(':')[0]}:redundancy=1"
    job = {**JOB, "shards": SHARDS}
    ours, theirs = (mpiddl.train("mlp", "digits", comm=comm, strategy=name, **job) for name in (strategy, "allreduce"))
    assert len(set(comm.allgather(weights(ours).tobytes()))) == 1
    assert distance(weights(ours), weights(theirs)) < (1e-6 if strategy.startswith("coded:") or strategy == "coded" else 1e-12)


@pytest.mark.no_mpi
@pytest.mark.parametrize("redundancy", [1, 2, 3, 4])
def test_bytes_are_those_of_the_formulas(redundancy):
    summary, groups = on_virtual_ranks(4, f"coded-sum:redundancy={redundancy}")[0].summary, 4 // redundancy
    wanted = groups * 8 * PARAMETERS * summary["steps"] if groups > 1 else 0
    assert sum(rank["bytes"] for rank in summary["per_rank"]) == wanted


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("strategy", only({MDS_RING}, [TWO, RINGS, MDS, MDS_RING]))
def test_resumed_with_the_bits_of_a_run_that_was_not_stopped(comm, tmp_path, strategy):
    folder = comm.bcast(str(tmp_path))
    whole = mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, **JOB)
    mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, out=folder, max_steps=25, **JOB)
    resumed = mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, out=folder, resume=True, max_steps=0, **JOB)
    assert weights(resumed).tobytes() == weights(whole).tobytes()


def simulated(strategy, size=4, **more):
    job = {**JOB, "validation": 0.0, "log_every": 1000, "message_seconds": 0.01}
    return mpiddl.train("mlp", "digits", simulate=size, strategy=strategy, **{**job, **more})


@pytest.mark.no_mpi
@pytest.mark.parametrize("conditions", [{"slow": "1:5"}, *map(more, [
    {"slow": "3:2,0:3"}, {"drop": "2:4:30"}, {"jitter": 0.5}])], ids=str)
def test_bits_do_not_depend_on_who_is_late(conditions):
    usual, late = simulated(TWO), simulated(TWO, **conditions)
    assert weights(late).tobytes() == weights(usual).tobytes()
    assert not usual.summary["coding"]["not_waited_for"]
    assert late.summary["coding"]["not_waited_for"]


@pytest.mark.no_mpi
@pytest.mark.parametrize(("strategy", "most"), [(TWO, 0.55), more(MDS_LATE, 0.5),
                                                more("coded-sum:redundancy=3,code=mds,stragglers=1", 0.7)])
def test_steps_do_not_take_as_long_as_those_of_a_slow_worker(strategy, most):
    found, plain = (simulated(name, slow="1:5").summary for name in (strategy, "two-step"))
    assert found["seconds"] < most * plain["seconds"]
    assert found["coding"]["left_out"]["1"] > 10


@pytest.mark.no_mpi
@pytest.mark.parametrize(("strategy", "slow", "chosen"), [
    ("coded-sum", "", "Auto("),
    ("coded-sum", "1:5", "CodedSum(redundancy='2', code='slices', stragglers=0, transport='auto'"),
    ("coded-sum:code=mds,stragglers=1", "1:5", "CodedSum(redundancy='2', code='mds', stragglers=1, transport='auto'"),
    ("coded-sum:code=mds", "1:5", "Auto("),
])
def test_redundancy_is_chosen_by_what_steps_take(strategy, slow, chosen):
    summary = simulated(strategy, slow=slow).summary
    assert summary["strategy"].startswith(chosen)
    if "coding" in summary:
        assert summary["coding"]["predicted_s"] == pytest.approx(summary["coding"]["step_s"], rel=0.05)


@pytest.mark.no_mpi
def test_predictions():
    assert Network(0.5, 10.0).seconds(Load(0, 0, 20, 10)) == 2.5
    assert finished(cyclic(3, 2), [1.0, 1.0, 1.4], 2) == 2.0  # by chance: a worker is slow from 1.5 times the median on
    assert finished(cyclic(3, 2), [1.0, 1.0, 1.6], 2) == 3.2
    assert finished(replicated_groups(4, 2), [1.0, 1.0, 4.0, 1.0], 1) == 1.0
    assert finished(replicated_groups(4, 2), [4.0, 4.0, 1.0, 1.0], 1) == 4.0


@pytest.mark.no_mpi
@pytest.mark.parametrize("strategy", [CodedSum(redundancy="2"), CodedSum(redundancy="2", code="mds")])
def test_slow_workers_get_fewer_rows(strategy):
    """Workers 2 and 3 are three times as fast."""
    fast = replace(strategy, homes=(0, 1, 2, 3), rates=(1.0, 1.0, 3.0, 3.0))
    held = [fast.placement(64, rank, 4) for rank in range(4)]
    rows = [len(placement.shards) for placement in held]
    assert set().union(*(placement.shards for placement in held)) == set(range(64))
    assert sorted(shard for placement in held for shard in placement.scores) == list(range(64))
    assert sum(rows) == 128 and max(rows[:2]) <= 22 and min(rows[2:]) >= 42


@pytest.mark.no_mpi
@pytest.mark.parametrize(("spec", "message"), [
    ("coded-sum:redundancy=3", "redundancy: got 3 with 2 workers, expected a whole number from 1 to 2"),
    ("coded-sum:redundancy=0", "redundancy: got 0 with 2 workers, expected a whole number from 1 to 2"),
    ("coded-sum:redundancy=few", "redundancy: got 'few', expected auto or a whole number"),
    ("coded-sum:transport=pigeon", "transport: got 'pigeon', expected auto, multicast, unicast"),
    ("coded-sum:code=morse", "code: got 'morse', expected auto, slices, mds"),
    ("coded-sum:stragglers=1", "stragglers: got 1 with code auto, expected code mds"),
    ("coded-sum:code=mds,redundancy=2,stragglers=2", "stragglers: got 2 with redundancy 2, expected a whole number from 0"),
    ("coded-sum:code=mds,stragglers=-1", "stragglers: got -1 with redundancy auto, expected a whole number from 0"),
    ("coded-sum:code=mds,stragglers=2", "redundancy: got 3 with 2 workers"),
    ("coded-sum:code=mds,stragglers=1,redundancy=2,transport=unicast", "transport: got unicast with stragglers"),
    ("coded-sum:redundancy=2,rates=1", "got 'rates=1', expected parameters among redundancy=auto"),
    ("coded:clip=inf", "strategy coded: clip: got inf, expected a number above 0"),
    ("coded:turns=2", "strategy coded: turns: got 2, expected 0 or 1"),
    ("multicast-allreduce:ahead=1", "strategy multicast-allreduce: ahead: got 1"),
    ("coded-sum:ahead=1", "ahead: got 1, expected 2 or more"),
])
def test_parameters_that_make_no_sense(spec, message):
    with pytest.raises(UsageError, match=message):
        on_virtual_ranks(2, spec)


@pytest.mark.no_mpi
@pytest.mark.parametrize("strategy", [CodedSum, Coded])
def test_parameters_of_a_wrong_type(strategy):
    with pytest.raises(UsageError, match=r"got 2\.5, expected a whole number"):
        strategy(**{"ahead" if strategy is CodedSum else "redundancy": 2.5})


@pytest.mark.no_mpi
def test_bytes_of_measurements_are_not_those_of_the_run():
    ours, plain = (simulated(name, max_bytes=300_000).summary for name in ("coded-sum", "auto"))
    assert ours["steps"] == plain["steps"] > 1


@pytest.mark.no_mpi
@pytest.mark.parametrize("size", [1, 4])
def test_redundancy_is_chosen_where_messages_take_no_time(size):
    assert simulated("coded-sum", size, message_seconds=0.0).summary["strategy"].startswith("Auto(")


@pytest.mark.no_mpi
def test_redundant_computation_takes_its_time():
    once, twice = (simulated(f"coded:redundancy={r}", message_seconds=0.0).summary["seconds"] for r in (1, 2))
    assert twice == pytest.approx(2 * once)


@pytest.mark.no_mpi
def test_a_slow_worker_with_fewer_rows_takes_less_simulated_time():
    even, measured = (simulated(f"{RINGS},speeds={speeds}", message_seconds=0.0, slow="3:4", max_steps=10).summary["seconds"]
                      for speeds in ("even", "measured"))
    assert measured < even / 2


@pytest.mark.no_mpi
@pytest.mark.parametrize("batch", [1, 7])
def test_small_batches_are_not_clipped_before_large_ones(batch):
    job = {"shards": 24, "batch": batch, "max_steps": 10}
    ours, plain = (on_virtual_ranks(4, name, **job)[0] for name in ("coded:clip=10", "allreduce"))
    assert distance(weights(ours), weights(plain)) < 1e-6
    assert ours.summary["clipped_fraction"] == 0


def one_step(strategy, value):
    """A step with gradients of which each element is ``value(rank)``."""

    def program(comm):
        step, grad = Step(4, 2, 6, 0.1), np.full(8, value(comm.rank))
        for number in range(2):
            strategy.combine_block(comm, {}, grad, number, step)
        return strategy.combine(comm, {}, grad, Replica(np.zeros(8), {}), step).grad.copy()

    return virtual.run(3, program)


@pytest.mark.no_mpi
@pytest.mark.parametrize("xor", [0, 1])
def test_copies_of_gradients_are_compared(xor):
    assert all(found == pytest.approx(3.0, abs=1e-6) for found in one_step(Coded(xor=xor), lambda rank: 1.0))
    with pytest.raises(CommError, match="computed different bits for the same gradient"):
        one_step(Coded(xor=xor), lambda rank: 1.0 + (rank == 1))


@pytest.mark.no_mpi
def test_a_gradient_that_is_not_finite_has_diverged():
    with pytest.raises(ConvergenceError, match=r"step 5: the gradient is not finite: training has diverged at rate 0\.1; try"):
        one_step(Coded(), lambda rank: float("nan"))


@pytest.mark.no_mpi
def test_the_clipped_fraction_is_that_of_all_ranks(capsys):
    found = on_virtual_ranks(3, "coded:clip=1e-4", quiet=False)[0].summary["clipped_fraction"]
    assert 0.01 < found < 1
    assert f"{100 * found:.2g} % of the elements of gradients were clipped" in capsys.readouterr().out


@pytest.mark.no_mpi
def test_fewer_rows_than_blocks():
    x, y = np.arange(12.0).reshape(3, 4), np.array([0, 1, 0])
    job = {**JOB, "batch": 2, "validation": 0.0, "test_fraction": 0.0}
    found = virtual.run(4, lambda comm: mpiddl.train("mlp", (x, y), comm=comm, strategy="coded", **job))
    assert len({weights(result).tobytes() for result in found}) == 1


class Half(Strategy):
    """Halves gradients."""

    def combine(self, comm, state, grad, replica, step):
        grad *= 0.5
        return Combined(grad, step.count, state)


@pytest.mark.no_mpi
@pytest.mark.parametrize("later", [CodedSum(redundancy="2"), CodedSum(redundancy="2", code="mds"), Coded()])
def test_behind_another_strategy_they_are_refused(later):
    with pytest.raises(UsageError, match="after another strategy, expected it as the first one"):
        chain(Half(), later)


@pytest.mark.no_mpi
def test_before_another_strategy_redundancy_is_chosen_as_alone():
    found = simulated(chain(CodedSum(), chain(Half())), slow="1:5")
    assert "redundancy='2'" in found.summary["strategy"]
    assert found.summary["coding"]["step_s"] == pytest.approx(2.02)


@pytest.mark.no_mpi
def test_more_workers_than_hosts_are_refused():
    with pytest.raises(UsageError, match="redundancy: got 3 with 2 workers"):
        on_nodes((0, 0, 1, 1), "coded-sum:redundancy=3")
