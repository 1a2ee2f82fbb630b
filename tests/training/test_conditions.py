"""Slow ranks and varying steps, in simulated time and in real time."""

from __future__ import annotations

import time

import numpy as np
import pytest
from harness.short_runs import JOB, weights

import mpiddl
import mpiddl.models
from mpiddl.errors import CommError, UsageError
from mpiddl.strategies import STRATEGIES
from mpiddl.strategies.server.two_sided import TwoSided
from mpiddl.training.conditions import Conditions
from mpiddl.training.job import read_drop, read_slow
from mpiddl.transport import virtual
from mpiddl.transport.base import ANY_SOURCE, IN_PLACE
from mpiddl.transport.virtual import Wire

pytestmark = pytest.mark.no_mpi


def simulated(size, program, latency=0.0, rate=float("inf")):
    return virtual.run(size, program, wire=Wire(latency, rate))


def test_who_is_earlier_goes_first():
    seen = []

    def program(comm):
        for step in range(4):
            comm.compute(1 + comm.rank)
            seen.append((comm.now(), comm.rank, step))

    simulated(3, program)
    assert seen == sorted(seen, key=lambda entry: entry[0]) and len(seen) == 12


def test_messages_take_latency_and_bytes_and_arrive_in_order():
    def program(comm):
        if comm.rank == 0:
            comm.compute(5)
            comm.Send(np.zeros(1000), 2)
            comm.Send(np.zeros(1), 2)  # does not overtake
            return None
        if comm.rank == 1:
            comm.compute(6)
            comm.Send(np.zeros(1), 2)
            return None
        found = []
        for _ in range(3):
            source = comm.Probe(ANY_SOURCE).source
            comm.Recv(np.zeros(1000), source)
            found.append((source, comm.now()))
        return found

    assert simulated(3, program, 2.0, 1000.0)[2] == [(1, 8.008), (0, 15.0), (0, 15.0)]


def test_a_sum_is_there_when_the_last_has_come_and_may_be_asked_for():
    def program(comm):
        comm.compute(10 * comm.rank)
        total = np.ones(100)
        request = comm.Iallreduce(IN_PLACE, total)
        comm.compute(1)
        asked = comm.now()
        while not request.Test():
            pass
        assert comm.meter.seconds == pytest.approx(comm.now() - asked)
        return asked, comm.now(), total[0]

    first, second = simulated(2, program, 0.5)
    assert first == (1.0, 10.5, 2.0) and second == (11.0, 11.0, 2.0)


def test_who_asks_for_what_nobody_sends_is_told_so():
    def program(comm):
        request = comm.Irecv(np.zeros(1), 1)
        while comm.rank == 0 and not request.Test():
            pass
        comm.compute(1)

    with pytest.raises(CommError, match=r"deadlocked: rank 0 waits for a message from 1"):
        simulated(2, program)


@pytest.mark.parametrize("strategy", ["allreduce", "delayed:delay=2", "local-sgd:period=4,delay=2", "hierarchical"])
def test_a_simulated_run_repeats_its_bits_and_its_times(strategy):
    settings = {**JOB, "simulate": 4, "slow": "1:3", "jitter": 0.2, "message_seconds": 0.3, "strategy": strategy}
    first, again = (mpiddl.train("mlp", "digits", **settings) for _ in range(2))
    assert weights(first).tobytes() == weights(again).tobytes() and first.history == again.history
    other = mpiddl.train("mlp", "digits", **{**settings, "seed": 1})
    assert first.summary["seconds"] != other.summary["seconds"]


def test_simulated_seconds_are_those_of_the_slowest():
    settings = {**JOB, "simulate": 3, "slow": "2:4", "step_seconds": 0.5, "strategy": "local-sgd:period=1000"}
    result = mpiddl.train("mlp", "digits", **settings)
    steps = result.summary["steps"]
    assert result.summary["seconds"] == pytest.approx(steps * 0.5 * 4)
    assert [split["compute"] for split in result.summary["per_rank"][:2]] == pytest.approx([steps * 0.5] * 2)


SENDING = [*(name for name in STRATEGIES if name != "alone"), "two-step:form=leader", "ring:overlap=1",
           "auto:bucket_bytes=1000",
           "local-sgd:period=4,delay=2", "delayed:delay=2", "gossip:pace=own", "elastic:pace=own",
           "gossip:bits=4,graph=complete"]


@pytest.mark.parametrize("node_workers", [1, 2])
@pytest.mark.parametrize("strategy", SENDING)
def test_what_is_no_step_is_communication_or_waiting(strategy, node_workers):
    settings = {**JOB, "simulate": 4, "message_seconds": 0.1, "step_seconds": 0.5, "max_steps": 12, "validation": 0.0,
                "node_workers": node_workers, "strategy": strategy}
    summary = mpiddl.train("mlp", "digits", **settings).summary
    steps = np.array([rank["compute"] for rank in summary["per_rank"]]) / 0.5
    assert steps == pytest.approx(np.round(steps), abs=1e-6) and 0 < steps[0] <= 4 * 12
    first = summary["per_rank"][0]
    assert sum(first[phase] for phase in ("compute", "communication", "waiting")) == pytest.approx(summary["seconds"], abs=1e-3)
    assert summary["seconds"] > first["compute"] + 0.05


@pytest.mark.parametrize("strategy", ["allreduce", "two-step", "ring"])
def test_who_comes_first_waits_for_the_last(strategy):
    settings = {**JOB, "simulate": 3, "message_seconds": 0.01, "slow": "2:4", "max_steps": 10, "strategy": strategy}
    first, second, last = mpiddl.train("mlp", "digits", **settings).summary["per_rank"]
    assert first["waiting"] > 29 and second["waiting"] > 29 and last["waiting"] < 1 and last["compute"] == pytest.approx(40)


def test_a_simulated_run_is_cut_short_and_goes_on(tmp_path):
    settings = {**JOB, "simulate": 3, "slow": "2:4", "jitter": 0.5, "strategy": "delayed:delay=3", "out": tmp_path}
    straight = mpiddl.train("mlp", "digits", **{**settings, "out": None})
    mpiddl.train("mlp", "digits", max_steps=11, **settings)
    resumed = mpiddl.train("mlp", "digits", resume=True, max_steps=0, **settings)
    assert weights(resumed).tobytes() == weights(straight).tobytes()
    assert resumed.summary["seconds"] == pytest.approx(straight.summary["seconds"], rel=0.1)


def test_draws_depend_on_rank_and_step_alone():
    conditions = Conditions({2: 3.0}, jitter=0.25, seed=4)
    drawn = np.array([[conditions.factor(rank, index) for index in range(400)] for rank in range(3)])
    assert drawn[:2].min() >= 1 and drawn[:2].max() <= 1.5 and abs(drawn[:2].mean() - 1.25) < 0.02
    assert drawn[2].min() >= 3 and conditions.factor(1, 7) == drawn[1, 7] != drawn[0, 7]


@pytest.mark.no_mpi
@pytest.mark.parametrize("left_out", [(), (4,), (4, 5)])
def test_a_rank_is_gone_although_its_next_gradient_is_left_out(left_out):
    """Once, before the first gradient that it computes from then on."""

    def program(comm):
        pace = Conditions({0: 2.0}, drop={0: (4, 7)}).pace(comm, 1.0)
        for index in (index for index in range(10) if index not in left_out):
            for number in range(2):
                pace(index, 0.0, number, 2)
        return comm.now()

    assert virtual.run(1, program, wire=virtual.Wire()) == [pytest.approx(2.0 * (10 - len(left_out) + 3))]


@pytest.mark.mpi
def test_a_slow_rank_sleeps(comm):
    last = comm.size - 1
    settings = {**JOB, "epochs": 1, "max_steps": 8, "strategy": "local-sgd:period=1000"}

    class Slow(type(mpiddl.models.MLP((2, 2)))):
        """Takes a while for a gradient."""

        def gradient(self, *args, **options):
            time.sleep(0.02)
            return super().gradient(*args, **options)

    result = mpiddl.train(Slow((64, 8, 10)), "digits", comm=comm, slow=f"{last}:6", **settings)
    computed = [split["compute"] for split in result.summary["per_rank"]]
    assert computed[last] > 8 * 0.02 * 6
    assert all(seconds > 8 * 0.02 for seconds in computed)


@pytest.mark.parametrize("text", ["3", "3:", ":2", "3:0.5", "3:nan", "3:inf", "-1:2", "1:2,1:3", "a:2", "1.5:2", "3:1e7",
                                  "spread", "spread:", "spread:0.5", "straggler:x", "spread:4,1:2", "equal:3"])  # fmt: skip
def test_slow_ranks_that_make_no_sense(text):
    with pytest.raises(UsageError, match=r"slow: got .* expected RANK:FACTOR"):
        read_slow(text)


def test_the_last_rank_that_trains_is_the_straggler():
    """Also beside a rank that only serves; nobody is one alone."""
    def times(**settings):
        settings = {**JOB, "simulate": 3, "slow": "straggler:8", "max_steps": 6, **settings}
        return [round(split["compute"]) for split in mpiddl.train("mlp", "digits", **settings).summary["per_rank"]]

    assert times() == [6, 6, 48] and times(strategy="asgd:communication=two-sided")[2] == 0
    alone = mpiddl.train("mlp", "digits", **{**JOB, "simulate": 1, "slow": "spread:8", "max_steps": 6}).summary
    assert alone["seconds"] == pytest.approx(6)


@pytest.mark.mpi
def test_ranks_that_there_are_not(comm):
    with pytest.raises(UsageError, match=f"slow: got rank {comm.size}, expected a rank from 0 to {comm.size - 1}"):
        mpiddl.train("mlp", "digits", comm=comm, slow=f"{comm.size}:2", **JOB)


@pytest.mark.mpi(min_size=2)
def test_several_ranks_cannot_simulate(comm):
    with pytest.raises(UsageError, match=f"simulate: got {comm.size} MPI ranks, expected 1"):
        mpiddl.train("mlp", "digits", comm=comm, simulate=4, **JOB)


def test_a_dry_run_tells_what_will_be_measured():
    from mpiddl.training.request import Request
    from mpiddl.training.run import describe

    def told(strategy):
        return describe(Request(settings={"simulate": 4, "strategy": strategy, "epochs": 1}))

    assert "measured         redundancy and speeds, before the first step" in told("coded-sum:speeds=measured")
    assert "measured  " not in told("coded-sum:redundancy=2")


def test_a_dry_run_tells_of_the_workers():
    from mpiddl.training.request import Request
    from mpiddl.training.run import describe

    settings = {"simulate": 5, "slow": "4:2", "epochs": 1}
    text = describe(Request(settings=settings))
    assert "rank 4 " in text and "rank 5" not in text


def test_a_worker_that_is_gone_for_a_while_holds_up_those_in_lockstep_alone():
    settings = {**JOB, "simulate": 4, "drop": "1:5:15", "validation": 0.0, "max_steps": 30}
    whole, free = (mpiddl.train("mlp", "digits", strategy=strategy, **settings).summary for strategy in ("allreduce", "asgd"))
    assert whole["seconds"] == pytest.approx(whole["steps"] + 10)
    assert free["seconds"] < free["steps"] + 6 and free["staleness"]["pushes"] == 3 * free["steps"]
    assert free["staleness"]["longest"] >= 2 * 10  # both others went on for as long


@pytest.mark.parametrize("strategy", ["ddc-asgd", "ssp:bound=1", "asgd:servers=2"])
def test_the_others_take_over_the_steps_of_one_that_has_gone(strategy):
    settings = {**JOB, "rate": 0.01, "simulate": 6, "drop": "2:7,0:20", "jitter": 0.1, "optimiser": "nesterov",
                "strategy": strategy, "max_steps": 40}
    first, again = (mpiddl.train("mlp", "digits", **settings) for _ in range(2))
    assert weights(first).tobytes() == weights(again).tobytes() and first.summary["test_accuracy"] > 0.6
    servers = 1 + ("servers" in strategy)
    assert first.summary["staleness"]["pushes"] == (6 - servers) * first.summary["steps"]
    sent = [split["messages"] for split in first.summary["per_rank"]]
    push = servers * (1 + (strategy == "ddc-asgd"))  # the gradient, and sums over its layers; a few come after the last push
    assert 0 <= sent[2] - 7 * push < 8 and 0 <= sent[0] - 20 * push < 8 and sent[1] > 40 * push


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("strategy", ["asgd", "asgd:communication=two-sided"])
def test_a_rank_that_has_gone(comm, strategy):
    result = mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, drop="0:3", **JOB)
    workers = comm.size - ("two-sided" in strategy)
    assert result.summary["staleness"]["pushes"] == workers * result.summary["steps"]
    assert len(set(comm.allgather(weights(result).tobytes()))) == 1


@pytest.mark.parametrize("text", ["3", "3:", "1:2:2", "1:5:3", "1:2:3:4", "-1:2", "1:-2", "1:2,1:3", "a:2", "1:2.5"])
def test_drop_outs_that_make_no_sense(text):
    with pytest.raises(UsageError, match=r"drop: got .* expected RANK:STEP or"):
        read_drop(text)


@pytest.mark.parametrize(("strategy", "drop", "message"), [
    ("allreduce", "1:5", r"drop: got a permanent stop of rank 1, but strategy AllReduce\(\) .* 1:5:STEP, or a strategy"),
    ("asgd", "2:5", "drop: got rank 2, which is a server"),
    ("asgd", "3:5:6", "drop: got rank 3, expected a rank from 0 to 2"),
])
def test_ranks_that_cannot_be_gone(strategy, drop, message):
    with pytest.raises(UsageError, match=message):
        mpiddl.train("mlp", "digits", simulate=3, strategy=strategy, drop=drop, **JOB)


def test_a_server_cannot_be_slow():
    with pytest.raises(UsageError, match="slow: got rank 2, which is a server"):
        mpiddl.train("mlp", "digits", simulate=3, strategy="asgd", slow="2:3", **JOB)


def test_a_look_for_messages_takes_no_time_and_finds_what_has_come():
    def program(comm):
        if comm.rank == 0:
            comm.compute(1.0)
            comm.Send(np.ones(1), 1, 7)
            return None
        seen = []
        for _ in range(4):
            comm.compute(0.6)
            seen.append(comm.Iprobe())
        return seen, comm.clock

    seen, clock = simulated(2, program, latency=1.0)[1]
    assert seen == [None, None, None, (0, 7)] and clock == pytest.approx(2.4)


def test_who_waits_for_a_meeting_is_told_when_the_other_worker_has_left(tmp_path, monkeypatch):
    """The slower worker makes the push with which a meeting is due while the other one is on its way out."""
    told, nobody_meets = [], TwoSided._nobody_meets
    monkeypatch.setattr(TwoSided, "_nobody_meets", lambda self, *rest: told.append(1) or nobody_meets(self, *rest))
    settings = {**JOB, "simulate": 3, "strategy": "asgd:communication=two-sided", "slow": "0:1.02", "drop": "1:3",
                "checkpoint_every": 3, "message_seconds": 0.3, "out": tmp_path}
    summary = mpiddl.train("softmax", "digits", **settings).summary
    assert told == [1] and summary["staleness"]["pushes"] == 2 * summary["steps"]
