"""The parameter server whose workers apply the rule themselves: the laws of pushes and pulls, and what goes wrong."""

from __future__ import annotations

import shutil
import sys
from itertools import chain, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from harness.short_runs import RULES, settings, weights
from harness.tiers import more
from mpi4py import MPI

import mpiddl
from mpiddl.errors import CommError, UsageError
from mpiddl.node.topology import neighbours
from mpiddl.strategies import ASGD, DANA, DDCASGD, Replica, Step, make_strategy
from mpiddl.strategies.server import one_sided_check as trial
from mpiddl.strategies.server import shards
from mpiddl.strategies.server.one_sided import OneSided
from mpiddl.strategies.server.push_ledger import Ledger
from mpiddl.strategies.server.two_sided import TwoSided
from mpiddl.transport import virtual
from mpiddl.transport.mpi import MpiComm

pytestmark = pytest.mark.no_mpi


def trained(comm, rule, way="one-sided", **more):
    return mpiddl.train("mlp", "digits", comm=comm, **settings(f"{rule}:communication={way}", **more))


def adding(size):
    """Parameters to which gradients are added."""

    def add(params, grad, moments, rate, scale, step):
        params += scale * grad

    return Replica(np.zeros(size), {}, add, lambda steps: 1.0)


def pushed(comm, rule, value, size, steps, meet=0):
    """Each rank pushes ``value(pulled)`` as gradients that are added to the parameters.

    Returns what this rank has pulled, shape (pushes, size), the parameters at the end, the delays, and the number of meetings.
    A rank that starts late may find that the others have made all pushes.
    """
    replica, strategy = adding(size), OneSided(rule)
    state, grad, seen, met = strategy.init(comm, replica), np.zeros(size), [], 0
    while True:
        grad[:] = value(replica.params)
        combined = strategy.combine(comm, state, grad, replica, Step(0, 1, comm.size, 1.0, steps, meet))
        state = combined.state
        if combined.stop:
            break
        seen.append(replica.params.copy())
        if combined.meet:
            met += 1
            assert len(set(comm.setup_allgather(replica.params.tobytes()))) == 1
    strategy.finish(comm, state, replica)
    return np.reshape(seen, (-1, size)), replica.params, strategy.figures(comm, state, replica)["staleness"], met


NODES = ["one node", "two nodes", "remote memory"] if MPI.COMM_WORLD.size > 1 else ["one node"]
ON_MOST_NODES = pytest.mark.parametrize("placed", NODES[1:2] or NODES, indirect=True)


@pytest.fixture(params=NODES)
def placed(request, link, monkeypatch):
    """A communicator whose ranks believe to be on one node, or on two, the first of which has one rank.

    "remote memory": requests to the other node go the way that they go over verbs, here over MPI.
    """
    nodes = [0] + [int(request.param != "one node")] * (link.size - 1)
    monkeypatch.setattr(MpiComm, "nodes", lambda self: nodes[: self.size])
    if request.param == "remote memory":
        monkeypatch.setattr(shards, "works", lambda comm, aloud: True)
        monkeypatch.setattr(shards, "VERBS", "mpi")
    return link


@pytest.mark.mpi
@pytest.mark.parametrize("servers", [1, 3])
def test_ten_thousand_pushes_of_one_add_up(comm, placed, servers):
    near = neighbours(placed).topology
    steps = (10_000 // servers if len(near.nodes) == 1 else 600 // servers) // comm.size
    seen, params, delays, _ = pushed(placed, ASGD(min(servers, comm.size)), lambda _: 1.0, 64, steps)
    assert (params == steps * comm.size).all() and delays["pushes"] == steps * comm.size
    assert (np.diff(seen, axis=0) >= 0).all()
    assert sum(comm.allgather(len(seen))) == steps * comm.size


@pytest.mark.mpi
@pytest.mark.parametrize("servers", [1, 3])
def test_no_reader_ever_sees_two_stamps_in_a_shard(comm, placed, servers):
    size, servers, stamp = 60_001, min(servers, comm.size), [0.0]

    class Stamps(ASGD):
        needs_pulled = False  # over remote memory, shards are read

        def correct(self, state, push):
            push.grad -= push.params  # so that the parameters become this worker's stamp
            return 1.0

    def value(_):
        stamp[0] += 1
        return comm.rank * 1000 + stamp[0]

    seen, params, _, _ = pushed(placed, Stamps(servers), value, size, 60)
    edges = [number * (size // servers) + min(number, size % servers) for number in range(servers + 1)]
    for begin, end in pairwise(edges):
        assert (seen[:, begin:end] == seen[:, begin : begin + 1]).all()
    assert len(set(comm.allgather(params.tobytes()))) == 1


@pytest.mark.mpi
@pytest.mark.parametrize("rule", [ASGD, DANA])
def test_moments_of_the_model_are_those_of_all_pushes(comm, placed, rule):
    """The moment is the number of pushes that it has seen: all of them, or those of its worker, of which the mean counts."""

    def counting(params, grad, moments, rate, scale, step):
        moments["pushes"] += grad

    for servers in range(1, comm.size + 1):
        replica = Replica(np.zeros(7), {"pushes": np.zeros(7)}, counting, lambda steps: 1.0, updates=100)
        strategy = OneSided(rule(servers))
        state, stop = strategy.init(placed, replica), False
        while not stop:
            combined = strategy.combine(placed, state, np.ones(7), replica, Step(0, 1, comm.size, 1.0, 6))
            state, stop = combined.state, combined.stop
        strategy.finish(placed, state, replica)
        moments, seen = strategy.moments(placed, state, replica)
        pushes = 6 if rule is DANA else 6 * comm.size
        np.testing.assert_allclose(moments["pushes"], pushes)
        assert comm.allgather(seen) == [100 + pushes] * comm.size


@pytest.mark.mpi
def test_sums_over_layers_come_with_a_gradient(comm, placed):
    told = []

    class Telling(ASGD):
        sums_layers = True

        def correct(self, state, push):
            told.append((push.worker, push.sums.tolist(), push.layers))
            return 1.0

    layers, servers = [slice(0, 5), slice(5, 12)], comm.size
    replica = Replica(np.zeros(12), {}, lambda *arguments: None, lambda steps: 1.0, layers=layers)
    strategy = OneSided(Telling(servers))
    state = strategy.init(placed, replica)
    strategy.combine(placed, state, np.full(12, -1.0 - comm.rank), replica, Step(0, 1, comm.size, 1.0, 1))
    strategy.finish(placed, state, replica)
    told = list(chain.from_iterable(comm.allgather(told)))
    assert len(told) == comm.size * servers
    assert all(sums == [5 * (worker + 1), 7 * (worker + 1)] for worker, sums, _ in told)
    assert sum(part.stop - part.start for _, _, parts in told for _, part in parts) == 12 * comm.size


@pytest.mark.mpi
def test_a_worker_that_leaves_releases_those_that_wait_for_a_meeting(comm, link):
    ledger = Ledger(link, np.zeros(Ledger.WORDS, np.int64))
    ledger.begin(0, 0)
    number = ledger.arrive(10, 10, 100)
    assert (number, ledger.decided(number)) == (1, int(comm.size == 1))
    if comm.size > 1:
        ledger.leave()
        assert ledger.decided(number) == -1 and ledger.arrive(20, 10, 100) == 0


@pytest.mark.mpi(min_size=2)
def test_all_meet_with_nothing_on_its_way(comm, placed):
    _, params, delays, met = pushed(placed, ASGD(2), lambda _: 1.0, 64, 50, meet=10)
    assert comm.allgather(met) == [4] * comm.size
    assert (params == 50 * comm.size).all() and delays["pushes"] == 50 * comm.size


@pytest.mark.mpi(min_size=2)
def test_a_meeting_is_waited_for_and_traffic_between_nodes_has_messages(comm, placed, monkeypatch):
    """By a clock that goes on only while a rank sleeps for a meeting; the last rank comes when all others have slept."""
    slept, last, size = [0.0], comm.size - 1, 64

    def sleep(seconds):
        if comm.rank != last and not slept[0]:
            comm.isend(None, last)
        slept[0] += 1

    def value(pulled):
        if comm.rank == last and not slept[0]:
            slept[0] = 1e-9
            for rank in range(last):
                comm.recv(source=rank)
        return 1.0

    monkeypatch.setattr("mpiddl.strategies.server.shards.time", SimpleNamespace(sleep=sleep))
    placed.now = lambda: slept[0]
    sent = placed.meter.messages
    pushed(placed, ASGD(1), value, size, 10, meet=1)
    assert placed.meter.waiting == pytest.approx(slept[0], abs=1e-6) and placed.meter.moving == pytest.approx(0, abs=1e-6)
    assert slept[0] >= 1 or comm.rank == last
    far = len(neighbours(placed).topology.nodes) > 1  # rank 0 then is alone on its node, and serves none
    messages, moved = (sum(comm.allgather(count)) for count in (placed.meter.messages - sent, placed.meter.bytes))
    assert (messages, moved) == (0, 0) if not far else messages >= 10 * 4 and moved >= 10 * 2 * size * 8


@pytest.mark.mpi(min_size=2)
def test_a_push_has_the_number_of_changes_since_its_pull(comm, placed):
    pushes_seen = []

    class Recording(ASGD):
        def correct(self, state, push):
            pushes_seen.append((push.worker, push.delay))
            return 1.0

    replica, strategy = adding(4), OneSided(Recording(1))
    state = strategy.init(placed, replica)
    for worker, pushes in [(0, 1), (1, 3), (0, 2), (1, 1)]:  # one after the other
        for _ in range(pushes if comm.rank == worker else 0):
            state = strategy.combine(placed, state, np.ones(4), replica, Step(0, 1, comm.size, 1.0, 100)).state
        comm.Barrier()
    strategy.finish(placed, state, replica)
    pushes_seen = list(chain.from_iterable(comm.allgather(pushes_seen)))  # of all ranks: a server applies pushes of other nodes
    assert [[delay for by, delay in pushes_seen if by == worker] for worker in (0, 1)] == [[0, 3, 0], [1, 0, 0, 2]]


@pytest.mark.mpi(min_size=2)
def test_a_worker_that_leaves_does_not_stop_the_others(comm, placed):
    replica, strategy, steps, done = adding(8), OneSided(ASGD(1)), 30, 0
    state = strategy.init(placed, replica)
    while not (comm.rank == 1 and done == 3):
        combined = strategy.combine(placed, state, np.ones(8), replica, Step(0, 1, comm.size, 1.0, steps, 10))
        state, done = combined.state, done + (not combined.stop)
        if combined.stop:
            break
    strategy.finish(placed, state, replica)
    counts = comm.allgather(done)
    assert counts[1] <= 3 and sum(counts) == steps * comm.size and (replica.params == sum(counts)).all()


@pytest.fixture
def flags(comm):
    """A byte for each rank, in memory of all."""
    window = MPI.Win.Allocate_shared(comm.size if comm.rank == 0 else 0, 1, comm=comm)
    found = np.frombuffer(window.Shared_query(0)[0], np.uint8)
    found[comm.rank] = 0
    comm.Barrier()
    yield found
    window.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("servers", [1, 0])
def test_nobody_waits_for_a_rank_that_computes(comm, placed, flags, servers):
    """The last rank, which serves, computes and calls nobody until the others have pushed and pulled five times more."""
    replica, strategy = adding(1000), OneSided(ASGD(servers or comm.size))
    state = strategy.init(placed, replica)
    for step in range(6):
        while step == 1 and comm.rank == comm.size - 1 and flags.sum() < comm.size - 1:
            np.sort(np.arange(100_000.0)[::-1])
        state = strategy.combine(placed, state, np.ones(1000), replica, Step(0, 1, comm.size, 1.0, 100)).state
    flags[comm.rank] = 1
    strategy.finish(placed, state, replica)
    assert (replica.params == 6 * comm.size).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("optimiser", ["nesterov", "momentum", "sgd", "adam"])
def test_with_one_worker_every_rule_is_the_optimiser_alone(comm, rule, optimiser):
    wanted = make_strategy(rule).optimisers
    if wanted and optimiser not in wanted:
        return
    short = {"epochs": 1, "optimiser": optimiser, "weight_decay": 0.01}
    alone = mpiddl.train("mlp", "digits", **settings("alone", **short))
    mine = trained(comm, rule, **short)
    assert weights(mine).tobytes() == weights(alone).tobytes()
    assert mine.summary["steps"] == alone.summary["steps"] and mine.summary["staleness"]["longest"] == 0


def test_with_one_worker_both_kinds_of_communication_have_the_same_bits(comm):
    short = {"epochs": 2, "clip": 1.0}
    served = mpiddl.train("mlp", "digits", simulate=2, **settings("ddc-asgd", **short))
    assert weights(trained(comm, "ddc-asgd", **short)).tobytes() == weights(served).tobytes()


@pytest.mark.mpi
@pytest.mark.parametrize("rule", ["asgd:servers=1", more("dc-asgd-a:servers=0"), more("ddc-asgd:servers=0")])
@pytest.mark.usefixtures("placed")
def test_all_ranks_learn(comm, rule):
    result = mpiddl.train("mlp", "digits", comm=comm, **settings(rule, rate=0.02 / comm.size, epochs=5))
    assert result.summary["strategy"].startswith("OneSided")  # chosen by itself
    assert result.summary["test_accuracy"] > 0.7
    assert result.summary["staleness"]["pushes"] == result.summary["steps"] * comm.size
    assert len(set(comm.allgather(weights(result).tobytes()))) == 1
    assert sum("validation_accuracy" in line for line in result.history) == 5


@pytest.mark.mpi
@ON_MOST_NODES
def test_a_run_goes_on_from_its_checkpoint(comm, placed, tmp_path_factory):
    out = comm.bcast(tmp_path_factory.mktemp("run") if comm.rank == 0 else None)
    given = {"out": out, "checkpoint_every": 9, "rate": 0.01 / comm.size, "epochs": 1}
    straight = trained(comm, "dc-asgd-a", **given)
    if comm.rank == 0:
        for later in sorted((out / "checkpoints").glob("step-*"))[1:]:
            shutil.rmtree(later)  # as if the job had been killed after the first
    comm.Barrier()
    resumed = trained(comm, "dc-asgd-a", **given, resume=True)
    assert resumed.summary["steps"] == straight.summary["steps"]
    assert resumed.summary["staleness"]["pushes"] == straight.summary["staleness"]["pushes"]
    if comm.size == 1:
        assert weights(resumed).tobytes() == weights(straight).tobytes()


@pytest.mark.mpi
@ON_MOST_NODES
def test_a_target_and_a_time_limit_end_all(comm, placed, ticking):
    result = trained(comm, "asgd", epochs=500, rate=0.02, target_accuracy=0.7)
    assert result.summary["ended"] == "validation accuracy reached 0.7"
    result = trained(comm, "asgd", epochs=10_000, max_seconds=0.2)
    assert result.summary["ended"] == "0.2 s are over" and result.summary["staleness"]["pushes"] > 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("failing", ["torn", "lost", "none"])
def test_where_the_trial_fails_servers_of_their_own_take_over(comm, monkeypatch, failing):
    def change(guard, data, stamp, times, really=trial._change):
        if failing == "none" and times > 1:
            raise CommError("a lock was not given back")
        torn = really(guard, data, stamp, times)
        if stamp == 2 and failing == "lost":
            with guard.changing():  # without, this could itself be lost
                data[0] -= 1
        return torn + (stamp == 2 and failing == "torn")

    monkeypatch.setattr(trial, "_change", change)
    with pytest.raises(CommError, match=r"got one-sided, but shared memory failed its trial: .*expected two-sided"):
        trained(comm, "asgd", epochs=1)
    result = trained(comm, "asgd", "auto", epochs=1)
    assert result.summary["strategy"] == "ASGD(servers=1, communication='two-sided')"


@pytest.mark.mpi(min_size=2)
@ON_MOST_NODES
def test_between_nodes_threads_are_wanted(comm, placed, monkeypatch, capfd):
    def check(self):
        raise CommError("threads: the library takes no calls from several")

    monkeypatch.setattr(MpiComm, "check_threads", check)
    result = trained(comm, "asgd", "auto", epochs=1, quiet=False)
    assert result.summary["strategy"] == "ASGD(servers=1, communication='two-sided')"
    said = "parameter server: two-sided, since threads: the library takes no calls from several"
    assert " ".join(capfd.readouterr().err.split()).count(said) == (comm.rank == 0)


@pytest.mark.mpi
def test_what_makes_no_sense(comm, link):
    with pytest.raises(UsageError, match=f"servers: got 9, expected 1 to {comm.size}, the number of ranks"):
        mpiddl.train("mlp", "digits", comm=comm, **settings("asgd:servers=9,communication=one-sided"))
    with pytest.raises(UsageError, match=r"communication: got 'onesided', expected one of auto, .*did you mean 'one-sided'"):
        trained(comm, "asgd", "onesided")
    with pytest.raises(UsageError, match=f"servers: got {comm.size} for 0 parameters"):
        OneSided(ASGD(comm.size)).init(link, Replica(np.zeros(0), {}))


FAILING = """
import mpiddl
from mpiddl.strategies import ASGD
from mpiddl.transport import comm

class Failing(ASGD):
    def correct(self, state, push):
        if push.worker == 1 and push.count == 3:
            raise ValueError("in the middle of an update")
        return 1.0

comm.GRACE_S = 0.3
mpiddl.train("mlp", "digits", strategy=Failing(communication="one-sided"), epochs=100_000, quiet=True)
"""


@pytest.mark.more
def test_a_rank_that_fails_in_the_middle_of_a_push_ends_the_job(mpirun):
    done = mpirun(3, sys.executable, "-c", FAILING)
    assert done.returncode != 0
    assert done.stderr.count("mpiddl: error on rank 1 of 3, the job ends") == 1
    assert done.stderr.count("ValueError: in the middle of an update") == 1


def test_virtual_ranks_take_turns_and_share_nothing():
    with pytest.raises(CommError, match="got one-sided, but virtual ranks take turns; expected two-sided"):
        mpiddl.train("mlp", "digits", simulate=2, **settings("asgd:communication=one-sided"))
    assert virtual.run(2, make_strategy(DDCASGD()).resolve)[0][0] == TwoSided(DDCASGD(servers=1, communication="two-sided"))
