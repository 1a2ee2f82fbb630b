"""The parameter server: what is promised of pushes and pulls, and the laws of the rules."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from harness.short_runs import RULES, distance, settings, weights
from harness.tiers import only

import mpiddl
from mpiddl.errors import UsageError
from mpiddl.models import MLP
from mpiddl.optim import SGD
from mpiddl.strategies import ASGD, DANA, DCASGD, DDCASGD, DCASGDAdaptive, DDCASGDLiteral, Replica, Step, make_strategy
from mpiddl.strategies.server.push import Push, layers_of
from mpiddl.strategies.server.two_sided import TwoSided
from mpiddl.training.loop import applying
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

TWO_SIDED = "asgd:communication=two-sided"


def simulated(rule, workers, **more):
    return mpiddl.train("mlp", "digits", simulate=workers + 1, **settings(rule, **more))


def pushed(comm, rule, value, size=1000, steps=50, meanwhile=lambda: None):
    """Each worker pushes ``value(pulled)`` as gradients that are added to the parameters; what it has pulled, and the end."""
    strategy, params, state, seen = TwoSided(rule), np.zeros(size), None, []

    def add(params, grad, moments, rate, scale, step):
        params += scale * grad

    replica = Replica(params, {}, add)
    state, grad, over = strategy.init(comm, replica), np.zeros(size), False
    while not over:
        if comm.rank < comm.size - rule.servers:
            grad[:] = value(params)
            meanwhile()
        combined = strategy.combine(comm, state, grad, replica, Step(0, 1, comm.size, 1.0, steps))
        state, over = combined.state, combined.stop
        seen.append(params.copy())
    strategy.finish(comm, state, replica)
    return np.array(seen), params, strategy.figures(comm, state, replica)["staleness"]


@pytest.mark.mpi(min_size=2)
def test_ten_thousand_pushes_of_one_add_up(comm, link):
    workers = comm.size - 1
    steps = 10_000 // workers
    seen, params, delays = pushed(link, ASGD(1), lambda _: 1.0, size=64, steps=steps)
    assert (params == steps * workers).all() and delays["pushes"] == steps * workers
    if comm.rank < workers:
        assert (np.diff(seen[:, 0]) >= 0).all() and (seen == seen[:, :1]).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_no_reader_ever_sees_two_stamps_in_a_shard(comm, link, servers):
    if servers >= comm.size:
        servers = comm.size - 1
    stamp = [0.0]

    def value(pulled):
        stamp[0] += 1
        return comm.rank * 1000 + stamp[0] - pulled  # so that the parameters become this worker's stamp

    class Stamps(ASGD):
        def correct(self, state, push):
            push.grad += push.before - push.params  # the pulled shard is what the worker has subtracted
            return 1.0

    seen, params, _ = pushed(link, Stamps(servers), value, size=100_003)
    if comm.rank < comm.size - servers:
        for number in range(servers):
            edges = np.linspace(0, 100_003, servers + 1)
            begin, end = int(np.ceil(edges[number] + 1)), int(edges[number + 1] - 1)
            assert (seen[:, begin:end] == seen[:, begin : begin + 1]).all()
    assert len(set(comm.allgather(params.tobytes()))) == 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("optimiser", ["nesterov", "momentum", "sgd", "adam"])
def test_with_one_worker_every_rule_is_the_optimiser_alone(rule, optimiser):
    wanted = make_strategy(rule).optimisers
    if wanted and optimiser not in wanted:
        with pytest.raises(UsageError, match=f"optimiser: got {optimiser}, expected {' or '.join(wanted)} for strategy "):
            simulated(rule, 1, optimiser=optimiser)
        return
    alone = mpiddl.train("mlp", "digits", **settings("alone", optimiser=optimiser))
    served = simulated(rule, 1, optimiser=optimiser)
    assert weights(served).tobytes() == weights(alone).tobytes()
    assert served.summary["steps"] == alone.summary["steps"]
    assert served.summary["staleness"]["longest"] == 0


@pytest.mark.parametrize(
    ("special", "parent"),
    [
        (DCASGD(strength=0), ASGD()),
        (DCASGDAdaptive(strength=0), ASGD()),
        (DDCASGD(damping=0, growth=0), DANA()),
        (DDCASGDLiteral(strength=0, p=0, q=0), ASGD()),
        (ASGD(servers=3), ASGD()),
        (DDCASGD(servers=2), DDCASGD()),
    ],
    ids=repr,
)
def test_special_cases_are_their_parents(special, parent):
    runs = [mpiddl.train("mlp", "digits", simulate=5 + strategy.serving, **settings(strategy, jitter=0.3, slow="1:3"))
            for strategy in (special, parent)]  # fmt: skip
    assert weights(runs[0]).tobytes() == weights(runs[1]).tobytes()


@pytest.mark.parametrize("rule", only({"asgd", "dana", "ddc-asgd"}, RULES))
def test_eight_workers_of_different_speed_learn_in_the_same_way_every_time(rule):
    rate = 0.012 if "literal" in rule else 0.004  # it divides the rate by the root of the delay
    runs = [simulated(rule, 8, slow="0:2,7:6", jitter=0.2, rate=rate, epochs=6) for _ in range(2)]
    assert weights(runs[0]).tobytes() == weights(runs[1]).tobytes()
    summary = runs[0].summary
    assert summary["test_accuracy"] > 0.8
    delays = summary["staleness"]
    assert delays["pushes"] == 8 * summary["steps"] and 5 <= delays["median"] <= 8 and delays["longest"] > 12
    assert summary["seconds"] < 8 * summary["steps"] / 5  # fast ones take over the work of the slow ones


def test_each_worker_of_dana_has_a_momentum_of_its_own():
    """Where each worker's gradient is constant and has one element, this element takes the steps of that worker alone."""
    apply, rate, steps = applying(SGD(momentum=0.9, nesterov=True), 0.0), 0.1, 8

    def program(comm):
        strategy, replica = TwoSided(DANA()), Replica(np.zeros(3), {"velocity": np.zeros(3)}, apply, lambda done: rate)
        state, over, grad = strategy.init(comm, replica), False, np.zeros(3)
        while not over:
            comm.compute(1.0)
            grad[:] = np.arange(3) == comm.rank
            combined = strategy.combine(comm, state, grad, replica, Step(0, 1, 3, rate, steps))
            state, over = combined.state, combined.stop
        strategy.finish(comm, state, replica)
        return replica.params

    alone, velocity = np.zeros(1), {"velocity": np.zeros(1)}
    for step in range(steps):
        apply(alone, np.ones(1), velocity, rate, 1.0, step)
    np.testing.assert_allclose(virtual.run(4, program, wire=virtual.Wire())[0], np.repeat(alone, 3))


def test_delays_are_those_of_the_schedule():
    """Equal workers push in turn: the first ones meet 0, 1, 2, ... updates, then each W - 1."""
    result = simulated("asgd", 4, epochs=1, max_steps=10)
    assert result.summary["staleness"]["histogram"] == {"0": 1, "1": 1, "2": 1, "3": 37}


@pytest.mark.parametrize("workers", [1, 4])
def test_rules_are_what_they_say(workers):
    rng = np.random.default_rng(workers)
    params, before, grad = rng.standard_normal((3, 50))
    square = rng.random((workers, 50))

    def push(delay):
        return Push(params.copy(), grad.copy(), before, 0, workers, delay, 9, 0.5)

    constant, adaptive = push(3), push(3)
    assert DCASGD(strength=0.5).correct({}, constant) == 1
    np.testing.assert_allclose(constant.grad, grad + 0.5 * grad**2 * (params - before))
    mean = 0.9 * square[0] + 0.1 * grad**2
    wanted = grad + 3 / np.sqrt(mean + 1e-7) * grad**2 * (params - before)
    state = {"square": square.copy()}
    assert DCASGDAdaptive(strength=3, decay=0.9).correct(state, adaptive) == 1
    np.testing.assert_allclose(adaptive.grad, wanted)
    np.testing.assert_allclose(state["square"][0], mean)
    np.testing.assert_array_equal(state["square"][1:], square[1:])
    late = push(4)
    assert make_strategy("staleness-aware").rule.correct({}, late) == 1 and late.rate == 0.5 / 4


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("delay", [0, 6])
def test_a_late_step_is_damped_by_curvature_and_delay(workers, delay):
    rng = np.random.default_rng(workers)
    params, grad, velocity = rng.standard_normal((3, 50))
    square, sums, told = rng.random(50), rng.random(2), np.array([30.0, 7.0])
    push = Push(params.copy(), grad.copy(), params, 0, workers, delay, 9, 0.5, {"velocity": velocity.copy()}, 9, told,
                layers_of([slice(0, 60), slice(60, 90)], 20, 70))
    state = {"square": square.copy(), "layer sums": sums.copy(), "version": 4}
    DDCASGD(damping=0.02, decay=0.9, growth=0.5).update(state, push, applying(SGD(0.9, nesterov=True), 0.0))
    growth, late = np.sqrt(1 + 0.5 * (workers - 1)), max(delay, workers - 1)
    mean, means = 0.9 * square + 0.1 * grad**2, 0.9 * sums + 0.1 * told
    curvature = np.sqrt(mean / (1 - 0.9**5)) * np.repeat(means / (1 - 0.9**5), [40, 10])
    damped = growth / np.sqrt(1 + (0.02 * growth * 0.5 * late * curvature) ** 2)
    np.testing.assert_allclose(push.params, params - 0.5 * damped * (grad + 0.9 * (0.9 * velocity + grad)))
    np.testing.assert_allclose(push.moments["velocity"], 0.9 * velocity + grad)
    np.testing.assert_allclose(state["square"], mean)
    np.testing.assert_allclose(state["layer sums"], means)


def test_a_late_step_of_an_adaptive_optimiser_is_that_of_the_optimiser():
    params, grad = np.arange(4.0), np.ones(4)
    push = Push(params.copy(), grad, params, 0, 4, 6, 9, 0.5, {"velocity": np.zeros(4)}, proportional=False)
    DDCASGD().update({"square": np.zeros(4), "layer sums": np.zeros(1), "version": 4}, push, applying(SGD(0.9), 0.0))
    np.testing.assert_array_equal(push.params, params - 0.5)


class WithDeadParameters(MLP):
    """An `MLP` with parameters whose gradient is always ``slope``."""

    dead, slope = 0, 0.0

    @property
    def shapes(self):
        return {**super().shapes, "dead": (self.dead,)}

    def gradient(self, params, x, y, grad, **more):
        grad["dead"][:] = self.slope * len(x)
        return super().gradient(params, x, y, grad, **more)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("dead, slope, most", [(5000, 0.0, 1e-12), (500, 1e-8, 1e-12)])
def test_parameters_without_gradients_change_nothing(servers, dead, slope, most):
    """Layers lie on several servers, and the boundaries move with the dead parameters."""
    found = []
    for WithDeadParameters.dead, WithDeadParameters.slope in ((1, 0.0), (dead, slope)):
        job = settings(f"ddc-asgd:servers={servers}", epochs=1, simulate=4 + servers)
        params = mpiddl.train(WithDeadParameters((64, 16, 10)), "digits", **job).params
        found.append(np.concatenate([array.ravel() for name, array in params.items() if name != "dead"]))
    assert distance(*found) < most


def test_the_published_rule_lowers_rate_and_momentum_and_corrects_with_the_delay():
    rng = np.random.default_rng(0)
    params, before, grad, velocity = rng.standard_normal((4, 20))
    square = rng.random((2, 20))
    push = Push(params.copy(), grad.copy(), before, 1, 2, 4, 9, 0.5, {"velocity": velocity.copy()})
    state = {"square": square.copy()}
    rule = DDCASGDLiteral(p=0.5, q=2.0, strength=3.0, reference=10.0, decay=0.9)
    rule.update(state, push, applying(SGD(0.8), 0.0))
    mean, factor = 0.9 * square[1] + 0.1 * grad**2, 5**-0.5
    corrected = grad + 3 * 0.4 / np.sqrt(mean + 1e-7) * grad**2 * (params - before)
    wanted = 0.8 * factor**2 * velocity + factor * corrected
    np.testing.assert_allclose(push.moments["velocity"], wanted)
    np.testing.assert_allclose(push.params, params - 0.5 * wanted)
    np.testing.assert_array_equal(state["square"][0], square[0])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("rule", ["asgd", "ddc-asgd"])
def test_on_real_ranks(comm, rule):
    result = mpiddl.train("mlp", "digits", comm=comm, **settings(f"{rule}:communication=two-sided", rate=0.02))
    assert result.summary["test_accuracy"] > 0.7
    assert result.summary["staleness"]["pushes"] == result.summary["steps"] * (comm.size - 1)
    assert len(set(comm.allgather(weights(result).tobytes()))) == 1
    if comm.size == 2:
        alone = virtual.run(1, lambda own: mpiddl.train("mlp", "digits", comm=own, **settings("alone", rate=0.02)))[0]
        assert distance(weights(result), weights(alone)) < 1e-12


@pytest.mark.mpi(min_size=2)
def test_a_time_limit_ends_all(comm, ticking):
    result = mpiddl.train("mlp", "digits", comm=comm, **settings(TWO_SIDED, epochs=10_000, max_seconds=0.5))
    assert result.summary["ended"] == "0.5 s are over" and result.summary["staleness"]["pushes"] > 0


def test_a_worker_that_leaves_does_not_stop_the_others():
    def program(comm):
        strategy, replica = TwoSided(ASGD()), Replica(np.zeros(8), {}, lambda params, grad, *rest: params.__iadd__(grad))
        state, done = strategy.init(comm, replica), 0
        while not (comm.rank == 1 and done == 3):
            comm.compute(1.0)
            combined = strategy.combine(comm, state, np.ones(8), replica, Step(0, 1, 3, 1.0, 20))
            state, done = combined.state, done + 1
            if combined.stop:
                break
        strategy.finish(comm, state, replica)
        return replica.params[0], done

    (first, long), (second, short), *_ = virtual.run(4, program, wire=virtual.Wire())
    assert first == second == 60 and short == 3 and long > 20


def test_a_meeting_waits_for_what_is_on_its_way_to_another_server():
    served, met = {}, []

    def program(comm):
        strategy, replica = TwoSided(ASGD(2)), Replica(np.zeros(8), {}, lambda params, grad, *rest: params.__iadd__(grad))
        state, over, send = strategy.init(comm, replica), False, comm.Send
        served[comm.rank] = state

        def far(buf, dest, tag=0):
            comm.wire = virtual.Wire(0.5 if comm.rank < 3 and dest == 4 else 0.0)
            send(buf, dest, tag)

        comm.Send = far
        while not over:
            comm.compute(1.0 + comm.rank if comm.rank < 3 else 0.0)
            combined = strategy.combine(comm, state, np.ones(8), replica, Step(0, 1, 3, 1.0, 20, 3))
            state, over = combined.state, combined.stop
            if combined.meet:
                comm.Barrier()
                met.append(served[3]["version"] - served[4]["version"])
                comm.Barrier()
        strategy.finish(comm, state, replica)

    virtual.run(5, program, wire=virtual.Wire())
    assert len(met) > 10 and not any(met)


@pytest.mark.parametrize(
    ("rule", "workers", "message"),
    [
        ("asgd:servers=3", 2, r"ranks: got 3, expected 4 or more: 3 as servers"),
        ("asgd:servers=-1", 2, "servers: got -1"),
        ("dc-asgd-c:strength=-1", 2, r"strength: got -1\.0"),
        ("dc-asgd-a:decay=1", 2, r"decay: got 1\.0"),
        ("ddc-asgd:damping=-1", 2, r"damping: got -1\.0"),
        ("ddc-asgd:decay=1", 2, r"decay: got 1\.0"),
        ("ddc-asgd-literal:q=-1", 2, r"q: got -1\.0"),
        ("ddc-asgd-literal:reference=0", 2, r"reference: got 0\.0"),
    ],
)
def test_what_makes_no_sense(rule, workers, message):
    with pytest.raises(UsageError, match=message):
        simulated(rule, workers)


def test_more_servers_than_parameters():
    with pytest.raises(UsageError, match="servers: got 3 for 2 parameters"):
        virtual.run(4, lambda comm: TwoSided(ASGD(3)).init(comm, Replica(np.zeros(2), {})))


@pytest.mark.parametrize("rule", ["asgd", "dc-asgd-a:servers=2", "ddc-asgd"])
def test_a_simulated_run_that_was_cut_has_the_bits_of_one_that_was_not(tmp_path, rule):
    given = settings(rule, simulate=6, slow="1:3", jitter=0.3, checkpoint_every=9, rate=0.005, out=tmp_path)
    straight = mpiddl.train("mlp", "digits", **given)
    kept = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert len(kept) == 3
    for later in kept[1:]:
        shutil.rmtree(later)  # as if the job had been killed after this checkpoint
    resumed = mpiddl.train("mlp", "digits", resume=True, **given)
    assert weights(resumed).tobytes() == weights(straight).tobytes()
    assert resumed.summary["staleness"] == straight.summary["staleness"]


def test_validation_of_what_the_servers_have():
    history = simulated("ddc-asgd:servers=2", 5, rate=0.02, epochs=6).history
    accuracy = [line["validation_accuracy"] for line in history if "validation_accuracy" in line]
    assert len(accuracy) == 6 and accuracy[-1] > 0.9


@pytest.mark.mpi(min_size=3)
def test_a_target_ends_all(comm):
    given = settings(f"{TWO_SIDED},servers=2", epochs=500, rate=0.02, optimiser="momentum", target_accuracy=0.7)
    assert mpiddl.train("mlp", "digits", comm=comm, **given).summary["ended"] == "validation accuracy reached 0.7"
