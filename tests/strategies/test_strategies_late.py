"""Delayed synchronisation: gradients and averages that are applied late, slow momentum, two levels."""

from __future__ import annotations

import numpy as np
import pytest
from harness.short_runs import JOB, distance, on_virtual_ranks, weights

import mpiddl
from mpiddl.errors import UsageError
from mpiddl.node.topology import neighbours
from mpiddl.optim import SGD
from mpiddl.strategies import AllReduce, Delayed, Hierarchical, LocalSGD, Replica, Step, chain, make_strategy
from mpiddl.training import checkpoint
from mpiddl.training.loop import applying
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

NODES = [[0, 0, 0], [0, 0, 1, 1], [0, 1, 0], [0, 1, 2]]


def steps(program, size, nodes=None):
    """What ``program(comm, step)`` returns on each rank, ``step`` being a function that makes a `Step`."""
    return virtual.run(size, lambda comm: program(comm, lambda index: Step(index, 1, size, 0.1)), nodes)


def mixed(strategy, given, count, nodes=None):
    """The parameters of each rank after each step, the rank's update in step t being ``given[rank, t]``."""

    def program(comm, step):
        replica = Replica(np.full(3, 10.0 * comm.rank), {"velocity": np.full(3, float(comm.rank))})
        state, seen = strategy.init(comm, replica), []
        for index in range(count):
            state = strategy.combine(comm, state, np.zeros(3), replica, step(index)).state
            replica.params += given[comm.rank, index]
            state = strategy.mix(comm, state, replica, step(index))
            seen.append(replica.params.copy())
        strategy.finish(comm, state, replica)
        return np.array([*seen, replica.params]), replica.moments["velocity"]

    return steps(program, len(given), nodes)


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("nodes", [None, [0, 0, 1]])
@pytest.mark.parametrize("kind", [LocalSGD, Hierarchical])
def test_late_averages_keep_the_mean_and_what_was_done_meanwhile(kind, nodes, delay):
    given = np.random.default_rng(0).standard_normal((3, 11, 3))
    found = np.array([params for params, _ in mixed(kind(4, delay), given, 11, nodes or [0, 1, 2])])
    if kind is LocalSGD or nodes is None:
        np.testing.assert_allclose(found.mean(axis=0)[:-1], 10 + np.cumsum(given.mean(axis=0), axis=0))
    x = 10.0 * np.arange(3)[:, None] + np.zeros((3, 3))
    kept = None
    for index in range(11):
        x = x + given[:, index]
        if kept is not None and index + 1 >= kept[0] + delay:
            x, kept = x + kept[1].mean(axis=0) - kept[1], None
        if (index + 1) % 4 == 0:
            x, kept = (x, (index + 1, x.copy())) if delay else (x * 0 + x.mean(axis=0), None)
        np.testing.assert_allclose(found[:, index], x)
    np.testing.assert_allclose(found[:, -1], np.broadcast_to(x.mean(axis=0), (3, 3)))


@pytest.mark.parametrize("momentum", ["own", "average", "reset"])
def test_what_becomes_of_momentum(momentum):
    found = [velocity for _, velocity in mixed(LocalSGD(2, momentum=momentum), np.zeros((3, 2, 3)), 2)]
    wanted = {"own": [0, 1, 2], "average": [1, 1, 1], "reset": [0, 0, 0]}[momentum]
    np.testing.assert_allclose(found, np.repeat(wanted, 3).reshape(3, 3))


def test_slow_momentum_is_that_of_its_source():
    given = np.random.default_rng(1).standard_normal((2, 15, 3))
    found = [params for params, _ in mixed(LocalSGD(3, outer=0.6, after=3), given, 15)]
    slow, began = np.zeros(3), np.array([[0.0] * 3, [10.0] * 3]) + given[:, :3].sum(axis=1)  # synchronous steps come before
    for period in range(1, 5):
        mean = (began + given[:, 3 * period : 3 * period + 3].sum(axis=1)).mean(axis=0)
        slow = 0.6 * slow + began - mean
        began = began - slow
        np.testing.assert_allclose([params[3 * period + 2] for params in found], began)


@pytest.mark.parametrize("nodes", NODES)
def test_hierarchical_is_all_reduce_in_a_node_and_local_sgd_between_nodes(nodes):
    settings = {**JOB, "optimiser": "sgd"}

    def run(strategy, size, nodes):
        return virtual.run(size, lambda comm: mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, **settings), nodes)

    found = weights(run(Hierarchical(3, 0), len(nodes), nodes)[0])
    alike = {1: AllReduce(), len(nodes): LocalSGD(3)}.get(len(set(nodes)))
    if alike is not None:
        assert distance(found, weights(run(alike, len(nodes), nodes)[0])) < 1e-12
    else:
        assert distance(found, weights(run(AllReduce(), len(nodes), nodes)[0])) > 1e-6
    assert len({weights(result).tobytes() for result in run(Hierarchical(3, 2), len(nodes), nodes)}) == 1


def test_ranks_of_a_node_have_the_same_bits_in_every_step():
    given = np.random.default_rng(2).standard_normal((2, 7, 3))[[0, 0, 1, 1]]

    def program(comm, step):
        replica = Replica(np.full(3, 10.0 * neighbours(comm).topology.node(comm.rank)), {})
        strategy, state, seen = Hierarchical(3, 1), {}, []
        for index in range(7):
            replica.params += given[comm.rank, index]
            state = strategy.mix(comm, state, replica, step(index))
            seen.append(replica.params.tobytes())
        return seen

    first, second, third, fourth = steps(program, 4, [0, 0, 1, 1])
    assert first == second and third == fourth and first != third


@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("ahead", [0, 1])
def test_late_gradients_are_those_of_where_own_ones_lead(delay, ahead):
    rate, mu, count = 0.1, 0.8, 12
    rng = np.random.default_rng(3)
    slopes, at = rng.standard_normal((2, 4)) + 2, {}

    def program(comm, step):
        apply = applying(SGD(momentum=mu), 0.0)
        replica, strategy = Replica(np.ones(4), {"velocity": np.zeros(4)}, apply), Delayed(delay, ahead)
        state = strategy.init(comm, replica)
        for index in range(count):
            at[index, comm.rank] = replica.params.copy()
            combined = strategy.combine(comm, state, slopes[comm.rank] * replica.params, replica, step(index))
            if combined.count:
                apply(replica.params, combined.grad, replica.moments, rate, 1 / combined.count, index)
            state = strategy.mix(comm, combined.state, replica, step(index))
        model = strategy.model(comm, state, replica.params)
        strategy.finish(comm, state, replica)
        return replica.params, replica.params if model is None else model

    (one, of_one), (other, of_other) = steps(program, 2)
    assert one.tobytes() == other.tobytes() == of_one.tobytes() == of_other.tobytes()
    x, velocity, flying = np.ones(4), np.zeros(4), []
    for index in range(count):
        for rank in range(2):
            there, v = x, velocity
            for own in flying if ahead else ():
                v = mu * v + own[rank]
                there = there - rate * v
            np.testing.assert_allclose(at[index, rank], there)
        flying.append([slopes[rank] * at[index, rank] for rank in range(2)])
        if len(flying) > delay:
            velocity = mu * velocity + np.mean(flying.pop(0), axis=0)
            x = x - rate * velocity
    np.testing.assert_allclose(one, x)


@pytest.mark.parametrize("optimiser", ["sgd", "nesterov", "adam"])
@pytest.mark.parametrize("delay", [1, 3])
def test_alone_it_takes_the_steps_of_allreduce_but_the_last(delay, optimiser):
    settings = {"optimiser": optimiser, "schedule": "constant", "clip": 0.5}
    late = on_virtual_ranks(1, Delayed(delay), **settings, max_steps=20 + delay)[0]
    assert weights(late).tobytes() == weights(on_virtual_ranks(1, AllReduce(), **settings, max_steps=20)[0]).tobytes()


@pytest.mark.parametrize("delay", [1, 2, 4])
def test_a_finished_run_goes_on_where_the_parameters_are(tmp_path, delay):
    settings = {"strategy": Delayed(delay), "out": tmp_path, "optimiser": "nesterov", "schedule": "constant"}
    first = on_virtual_ranks(2, **{**settings, "epochs": 1})[0]
    done = first.summary["steps"] + delay  # the first update nothing
    longer = on_virtual_ranks(2, **settings, max_steps=done + delay, resume=True)[0]
    assert weights(longer).tobytes() == weights(first).tobytes()


def test_a_run_that_goes_on_delayed_counts_the_updates_that_were(tmp_path):
    settings = {"optimiser": "adam", "schedule": "constant", "rate": 0.01}
    on_virtual_ranks(1, AllReduce(), **settings, out=tmp_path, max_steps=2)
    late = on_virtual_ranks(1, Delayed(3), **settings, out=tmp_path, max_steps=11, resume=True)[0]
    assert weights(late).tobytes() == weights(on_virtual_ranks(1, AllReduce(), **settings, max_steps=8)[0]).tobytes()


def test_nothing_mixes_what_is_a_guess():
    with pytest.raises(UsageError, match="before other strategies, which would mix its provisional"):
        chain(Delayed(1), LocalSGD(4))
    chain(LocalSGD(4), Delayed(1))
    chain(Delayed(1, ahead=0), LocalSGD(4))


@pytest.mark.parametrize("size", [3, 5])
def test_a_checkpoint_in_between_holds_what_has_arrived(tmp_path, size):
    settings = {"strategy": Delayed(2), "optimiser": "nesterov", "schedule": "constant"}
    on_virtual_ranks(size, **settings, out=tmp_path, max_steps=9, epochs=2, checkpoint_every=7)
    saved = checkpoint.load(min((tmp_path / "checkpoints").iterdir()))
    assert saved.manifest["index"] == 7
    there = on_virtual_ranks(size, **settings, max_steps=7)[0]
    assert saved.model.keys() == there.params.keys()
    for name, value in there.params.items():
        np.testing.assert_array_equal(saved.model[name], value)


def test_room_for_late_sums_is_made_when_it_is_wanted():
    few = mpiddl.train("mlp", "digits", strategy="delayed:delay=1000000000", **{**JOB, "max_steps": 3})
    assert few.summary["steps"] == 0


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["delayed:delay=2", "delayed:delay=1,ahead=0", "local-sgd:period=4,delay=2",
                                  "local-sgd:period=4,outer=0.3,after=5",
                                  "local-sgd:period=3,momentum=average", "hierarchical:period=4,delay=3"])  # fmt: skip
def test_on_real_ranks_as_on_virtual_ones(comm, name):
    real = mpiddl.train("mlp", "digits", comm=comm, strategy=name, **JOB)
    assert distance(weights(real), weights(on_virtual_ranks(comm.size, make_strategy(name))[0])) < 1e-9


@pytest.mark.parametrize("name", ["local-sgd:period=8", "local-sgd:period=8,delay=4", "hierarchical:period=8,delay=4"])
def test_an_eighth_of_the_bytes(name):
    def sent(strategy):
        def program(comm):
            return mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, **{**JOB, "epochs": 4})

        return virtual.run(4, program, range(4))[0].summary["bytes_sent"]

    assert sent(name) < sent("allreduce") / 7


def test_the_first_steps_may_be_synchronous():
    whole, post = (weights(on_virtual_ranks(3, strategy)[0]) for strategy in (AllReduce(), LocalSGD(4, after=10**6)))
    assert distance(post, whole) < 1e-12


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("delayed:delay=-1", "delay: got -1"),
        ("delayed:ahead=2", "ahead: got 2, expected 0 or 1"),
        ("local-sgd:period=4,delay=4", "delay: got 4, expected a number of steps from 0 to 3"),
        ("local-sgd:after=-1", "after: got -1"),
        ("local-sgd:momentum=none", "momentum: got 'none', expected one of own, average, reset"),
        ("local-sgd:outer=1", "outer: got 1.0"),
        ("local-sgd:outer=0.5,delay=2", "delay: got 2 with outer > 0 or momentum other than own"),
        ("hierarchical:period=0", "period: got 0"),
    ],
)
def test_what_makes_no_sense(name, message):
    with pytest.raises(UsageError, match=message):
        make_strategy(name)


def test_delay_is_a_strategy_of_its_own():
    assert make_strategy("delayed:delay=3") == Delayed(3)
