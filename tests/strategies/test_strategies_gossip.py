"""Gossip: what a round promises of the mean, of the consensus and of its bytes; graphs; adaptive rules; elastic averaging."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from harness.mixing import SIZE, mixed, walks
from harness.short_runs import JOB, distance, on_virtual_ranks, weights

import mpiddl
from mpiddl.errors import UsageError
from mpiddl.strategies import Elastic, ElasticAdaptive, Gossip, GossipAdaptive, GossipScheduled, Step, make_strategy
from mpiddl.strategies.gossip import graphs as of_graphs
from mpiddl.strategies.gossip.triggers import Trigger

pytestmark = pytest.mark.no_mpi

NAMES = ["gossip", "gossip:graph=ring,period=3", "gossip:graph=complete,direction=push,outer=0.4",
         "gossip-scheduled:share=0.3", "gossip-adaptive:theta=0.01,direction=push",
         "gossip-adaptive:traffic=0.2,tensors=1", "elastic:period=4", "elastic-adaptive:theta=0.02",
         "gossip-adaptive:graph=ring,trigger=norm,threshold=slope,theta=3,tensors=1"]  # fmt: skip
FEW = {**JOB, "max_steps": 25}


def sums(size, steps, given):
    """The mean of all updates so far, shape (steps, n)."""
    each = [[given(rank, step) for step in range(steps + 1)] for rank in range(size)]
    return np.cumsum(np.mean(each, axis=0), axis=0)[1:]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 12])
@pytest.mark.parametrize("graph", of_graphs.GRAPHS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_named_graphs_are_doubly_stochastic_and_connect_all_ranks(graph, size, symmetric):
    if graph == "matching" and size % 2 and size > 1:
        with pytest.raises(UsageError, match=f"graph: got matching on {size} ranks, expected an even number"):
            of_graphs.check(graph, size)
        return
    rounds = [of_graphs.weights(graph, size, number, symmetric) for number in range(60)]
    of_graphs.check(rounds, size, symmetric)
    for mixing in rounds:
        assert size == 1 or (graph == "complete" and symmetric) or np.count_nonzero(mixing, axis=1).max() <= 2
    assert distance(np.linalg.multi_dot(rounds), np.full((size, size), 1 / size)) < 0.3


def test_a_cycle_of_the_exponential_graph_is_the_mean():
    for symmetric in (True, False):
        cycle = [of_graphs.weights("exponential", 8, number, symmetric) for number in range(3)]
        np.testing.assert_allclose(np.linalg.multi_dot(cycle), np.full((8, 8), 1 / 8))


@pytest.mark.parametrize("size", [2, 4, 6])
@pytest.mark.parametrize("name", ["gossip", "gossip:graph=ring", "gossip:graph=matching,period=3", "gossip:direction=pull",
                                  "gossip:graph=complete,direction=push", "gossip:graph=ring,average=5",
                                  "gossip-scheduled:share=0.5",
                                  "gossip-adaptive:theta=0.3", "gossip-adaptive:theta=0.3,graph=complete",
                                  "gossip-adaptive:traffic=0.3,graph=ring"])  # fmt: skip
def test_rounds_do_not_change_the_mean_and_keep_ranks_together(name, size):
    given = walks()
    found = mixed(make_strategy(name), size, 60, given)
    seen, wanted = np.array([params for params, *_ in found]), sums(size, 60, given)
    np.testing.assert_allclose(seen.mean(axis=0), wanted, atol=1e-12)
    for params, final, *_ in found:
        np.testing.assert_allclose(final, wanted[-1], atol=1e-12)
        assert (np.linalg.norm(params - wanted, axis=1)[10:] < 0.1 * np.sqrt(SIZE) * 15).all()  # alone: the root of the steps
    assert len({final.tobytes() for _, final, *_ in found}) == 1


@pytest.mark.parametrize("direction", ["symmetric", "pull"])
def test_a_round_is_a_product_with_the_graphs_matrix(direction):
    mixing = 0.5 * np.eye(3) + 0.3 * np.roll(np.eye(3), 1, 0) + 0.2 * np.roll(np.eye(3), 2, 0)
    if direction == "symmetric":
        mixing = np.array([[0.6, 0.3, 0.1], [0.3, 0.2, 0.5], [0.1, 0.5, 0.4]])
    given = walks()
    found = mixed(Gossip([mixing], direction), 3, 1, given)
    wanted = mixing @ [given(rank, 0) + given(rank, 1) for rank in range(3)]
    np.testing.assert_allclose([params[0] for params, *_ in found], wanted)


def test_pushed_rounds_do_not_change_the_weighted_mean():
    given = walks()
    for graph in ("ring", "exponential"):
        found = mixed(GossipAdaptive(graph, "push", theta=0.4), 5, 50,
                      lambda rank, step: given(rank, 0) * (step == 0) + rank * 0.3 * (step % 7 == 3))
        shares = np.array([state["weights"][0] for *_, state, _ in found])
        seen = np.array([params[-1] for params, *_ in found])
        assert abs(shares.sum() - 5) < 1e-12 and shares.std() > 0.01
        assert all(0 < state["exchanges"] < 50 for *_, state, _ in found)
        np.testing.assert_allclose(found[0][1], shares @ seen / 5, atol=1e-12)
        np.testing.assert_allclose(found[0][2], found[0][1])


@pytest.mark.parametrize("how", ["graph=ring", "graph=exponential", "direction=pull", "graph=matching,direction=push"])
def test_slow_momentum_moves_the_mean_whatever_the_graph_and_does_not_throw_ranks_apart(how):
    given = walks()
    pairs, exact = (np.array([params for params, *_ in mixed(make_strategy(f"gossip:outer=0.9,{which}"), 8, 60, given)])
                    for which in (how, "graph=complete"))  # fmt: skip
    np.testing.assert_allclose(pairs.mean(axis=0), exact.mean(axis=0), atol=1e-10)
    assert np.linalg.norm(pairs[:, -1] - exact[:, -1], axis=-1).max() < 0.1 * np.sqrt(SIZE) * 10


@pytest.mark.parametrize("size", [2, 3, 5])
def test_on_the_complete_graph_it_is_an_average_by_all_reduce(size):
    names = "gossip:graph=complete", "local-sgd:period=1"
    gossip, local = (weights(on_virtual_ranks(size, name, **FEW)[0]) for name in names)
    assert gossip.tobytes() == local.tobytes()


@pytest.mark.parametrize("how", ["", "graph=ring", "graph=complete", "direction=pull", "direction=push,graph=complete",
                                 "outer=0.5", "momentum=average,period=2", "average=4"])  # fmt: skip
@pytest.mark.parametrize("tensors", [0, 1])
def test_theta_0_is_gossip(how, tensors):
    parts = [slice(0, 10), slice(10, SIZE)]
    names = f"gossip:{how}", f"gossip-adaptive:theta=0,tensors={tensors},{how}"
    plain, adaptive = (mixed(make_strategy(name), 4, 25, walks(), parts, "mv") for name in names)
    for (seen, final, *_), (others, their_final, *_) in zip(plain, adaptive, strict=True):
        assert seen.tobytes() == others.tobytes() and final.tobytes() == their_final.tobytes()


def test_theta_0_is_elastic():
    names = "elastic:period=2", "elastic-adaptive:period=2,theta=0"
    assert len({weights(on_virtual_ranks(3, name, **FEW)[0]).tobytes() for name in names}) == 1


@pytest.mark.parametrize(
    "strategy", [Gossip("ring"), Gossip(period=3), GossipScheduled(share=0.25), Gossip(momentum="average")], ids=repr
)
def test_messages_and_bytes_are_those_of_the_rounds(strategy):
    result = on_virtual_ranks(4, strategy, **FEW)[0]
    size, rounds = result.summary["parameters"] * 8, result.summary["exchanges"]
    arrays = 2 if strategy.momentum == "average" else 1
    assert rounds == strategy.rounds(25, 25)
    assert result.summary["bytes_sent"] == 4 * (rounds * arrays * size + 2 * 3 * size // 4)
    assert sum(split["messages"] for split in result.summary["per_rank"]) == 4 * (rounds * arrays + 1)


def test_adaptive_rounds_cost_a_word_and_what_is_exchanged():
    result = on_virtual_ranks(4, GossipAdaptive(theta=0.05), **FEW)[0]
    size, sent = result.summary["parameters"] * 8, result.summary["bytes_sent"]
    exchanged, left = divmod(sent - 4 * 25 * 8 - 4 * (2 * 3 * size // 4), size)
    assert left == 0 and 0 < exchanged < 60 and exchanged % 2 == 0
    messages = sum(split["messages"] for split in result.summary["per_rank"])
    assert messages == 4 * 25 + exchanged + 4


@pytest.mark.parametrize("name", ["gossip-adaptive:traffic=0.05", "gossip-adaptive:traffic=0.2,graph=complete,outer=0.5",
                                  "gossip-adaptive:traffic=0.1,graph=ring,direction=push", "elastic-adaptive:traffic=0.1",
                                  "gossip-adaptive:traffic=0.1,period=3", "gossip-adaptive:traffic=0.3,tensors=1"])  # fmt: skip
@pytest.mark.parametrize("power", [0, 2])
def test_traffic_is_what_was_asked_for(name, power):
    """Though changes are as small as those of a cosine's end."""
    given, steps, strategy = walks(), 300, make_strategy(name)
    found = mixed(strategy, 4, steps, lambda rank, step: given(rank, step) * (1 - step / (steps + 1)) ** power,
                  [slice(0, 10), slice(10, SIZE)])
    for *_, state, _ in found:
        assert abs(state["moves"] - strategy.traffic * steps).max() <= max(0.05 * strategy.traffic * steps, 2)


def test_traffic_that_rounds_are_too_few_for():
    for name in ("gossip-adaptive", "elastic-adaptive"):
        with pytest.raises(UsageError, match=r"traffic: got 0\.3 with period=4, expected at most 1 / 4 of the steps"):
            make_strategy(f"{name}:traffic=0.3,period=4")


@pytest.mark.parametrize("tensors", [0, 1])
def test_silence_has_an_end(tensors):
    parts = [slice(0, 10), slice(10, SIZE)]
    found = mixed(GossipAdaptive(theta=1e9, silence=7, tensors=tensors), 4, 50, walks(), parts)
    assert {state["exchanges"] for *_, state, _ in found} == {7 * (1 + tensors)}


def test_one_tensor_goes_while_others_stay():
    def given(rank, step):
        return np.where(np.arange(SIZE) < 10, 1.0 + rank, 0.001 * (rank + 1)) if step else np.ones(SIZE)

    found = mixed(GossipAdaptive("complete", theta=0.5, tensors=1), 2, 1, given, [slice(0, 10), slice(10, SIZE)])
    for rank, (seen, *_) in enumerate(found):
        assert (seen[0, :10] == 2.5).all() and (seen[0, 10:] == 1 + 0.001 * (rank + 1)).all()


def test_change_of_norm_is_blind_where_norm_of_change_is_not():
    last, turned = np.array([3.0, 4.0]), np.array([4.0, 3.0])
    rules = {name: Trigger(0.1, 0.0, name, "fixed", 0) for name in ("change", "norm")}
    assert rules["change"].change(turned, last) == pytest.approx(np.sqrt(2) / 5) and rules["norm"].change(turned, last) == 0
    assert rules["norm"].change(2 * last, last) == rules["change"].change(2 * last, last) == 1
    assert rules["change"].change(last, 0 * last) == np.inf and rules["change"].change(0 * last, 0 * last) == 0


def test_thresholds_are_what_they_say():
    params, parts = np.ones(4), [slice(None)]
    scaled, slope = Trigger(0.5, 0.0, "change", "rate", 0), Trigger(4.0, 0.0, "change", "slope", 0)
    state = scaled.state(params, parts)
    assert not scaled.wants(state, params * 1.4, parts, Step(0, 1, 1, 0.2))[0]
    assert scaled.wants(state, params * 1.4, parts, Step(1, 1, 1, 0.1))[0]  # at half the rate half the change
    state = slope.state(params, parts)
    assert slope.wants(state, params * 1.2, parts, Step(1, 1, 1, 0.1))[0]
    slope.taken(state, params * 1.2, slice(None), 0, 2)
    assert state["thresholds"][0] == pytest.approx(4 * 0.2 / 2)
    slope.taken(state, params, slice(None), 0, 3)  # asked for, before it has been looked at again
    assert state["thresholds"][0] == pytest.approx(4 * 0.2 / 2)


def test_a_schedule_is_dense_at_the_beginning():
    of_power = {power: GossipScheduled(share=0.1, power=power) for power in (1.0, 2.0, 3.0)}
    for power, strategy in of_power.items():
        counts = [strategy.rounds(done, 1000) for done in range(1001)]
        assert counts[-1] == 100 and max(np.diff(counts)) == 1
        assert counts[100] == pytest.approx(100 * (1 - 0.9**power), abs=1)


@pytest.mark.parametrize("share", [0, 0.3, 0.5, 0.8, 1])
@pytest.mark.parametrize("power", [1, 2, 10])
def test_a_schedule_has_its_share_of_rounds(share, power):
    strategy = GossipScheduled(share=share, power=power)
    gaps = np.diff([strategy.rounds(done, 200) for done in range(201)])
    assert gaps.sum() == 200 * share and gaps.min() >= 0 and gaps.max() <= 1


def test_elastic_is_that_of_its_source():
    given, alpha = walks(), 0.2
    found = mixed(Elastic(2, alpha), 3, 8, given)
    x = np.array([given(rank, 0) for rank in range(3)])
    centres = [given(rank, 0) for rank in range(3)]  # here ranks begin apart: each with a centre of its own
    for index in range(8):
        x = x + [given(rank, index + 1) for rank in range(3)]
        if index % 2:
            apart = np.array([x[rank] - centres[rank] for rank in range(3)])
            x = x - alpha * apart
            centres = [c + alpha * apart.sum(axis=0) for c in centres]
        np.testing.assert_allclose([params[index] for params, *_ in found], x)
    np.testing.assert_allclose([final for _, final, *_ in found], centres)


def test_elastic_keeps_the_sum_and_its_centre_is_the_model():
    results = on_virtual_ranks(4, "elastic:period=2", **JOB)
    assert len({weights(result).tobytes() for result in results}) == 1
    assert results[0].summary["test_accuracy"] > 0.6 and results[0].summary["exchanges"] == results[0].summary["steps"] // 2


@pytest.mark.parametrize("name", NAMES)
def test_they_learn_and_go_on_after_a_kill_as_if_it_had_not_been(tmp_path, name):
    settings = {"out": tmp_path, "checkpoint_every": 30}
    straight = on_virtual_ranks(4, make_strategy(name), **settings)
    for kept in sorted((tmp_path / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(kept)
    resumed = on_virtual_ranks(4, make_strategy(name), **settings, resume=True)
    assert len({weights(result).tobytes() for result in straight + resumed}) == 1
    assert resumed[0].summary["test_accuracy"] > 0.6


@pytest.mark.mpi
@pytest.mark.parametrize("name", NAMES)
def test_on_real_ranks_as_on_virtual_ones(comm, name):
    real = mpiddl.train("mlp", "digits", comm=comm, strategy=name, **FEW)
    assert distance(weights(real), weights(on_virtual_ranks(comm.size, make_strategy(name), **FEW)[0])) < 1e-9


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gossip:graph=rings", "graph: got 'rings', expected one of ring, exponential, matching, complete"),
        ("gossip:direction=shove", "direction: got 'shove', expected one of symmetric, pull, push"),
        ("gossip:period=0.5", "period: got '0.5', expected a value of type int"),
        ("gossip:period=0", "period: got 0, expected 1 or more"),
        ("gossip:outer=1", "outer: got 1.0"),
        ("gossip:momentum=reset", "momentum: got 'reset', expected one of own, average"),
        ("gossip:average=-1", "average: got -1"),
        ("gossip:pace=slow", "pace: got 'slow', expected together or own"),
        ("gossip:pace=own,average=3", "pace: got own with average > 0 or momentum=average"),
        ("gossip-adaptive:theta=-0.1", "theta: got -0.1, expected a relative change, 0 or more"),
        ("gossip-adaptive:theta=nan", "theta: got nan"),
        ("gossip-adaptive:traffic=2", "traffic: got 2.0"),
        ("gossip-adaptive:traffic=0.1,threshold=rate", "traffic: got 0.1 with threshold=rate"),
        ("gossip-adaptive:silence=-1", "silence: got -1"),
        ("gossip-adaptive:tensors=2", "tensors: got 2"),
        ("gossip-adaptive:pace=own,tensors=1", "pace: got own with tensors=1"),
        ("gossip-adaptive:trigger=none", "trigger: got 'none', expected change or norm"),
        ("gossip-adaptive:threshold=none", "threshold: got 'none', expected one of fixed, rate, slope"),
        ("gossip-scheduled:share=1.5", "share: got 1.5"),
        ("gossip-scheduled:power=0", "power: got 0.0"),
        ("elastic:period=0", "period: got 0"),
        ("elastic:alpha=-1", "alpha: got -1.0"),
        ("elastic:pace=slow", "pace: got 'slow', expected together or own"),
        ("elastic-adaptive:theta=-1", "theta: got -1.0"),
    ],
)
def test_what_makes_no_sense(name, message):
    with pytest.raises(UsageError, match=message):
        make_strategy(name)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (np.eye(4), "graph: got weights that do not connect rank 0 with ranks 1, 2, 3"),
        ([np.kron(np.eye(2), np.full((2, 2), 0.5))], "connect rank 0 with ranks 2, 3"),
        (np.triu(np.ones((4, 4))), "not doubly stochastic in round 0"),
        (np.roll(np.eye(4), 1, axis=0) * 2 - np.eye(4), "not doubly stochastic in round 0"),
        (np.roll(np.eye(4), 1, axis=0), "not symmetric in round 0, expected symmetric weights, or direction=pull or push"),
        (np.full((4, 4), np.nan), "not doubly stochastic"),
        (np.full((4, 4), 0.25 + 0.1j), "graph: got ndarray, expected one of"),
        (np.full((3, 3), 1 / 3), r"weights of shape \(1, 3, 3\), expected \(rounds, 4, 4\) for 4 ranks"),
        (np.ones(4), r"weights of shape \(4,\)"),
        (object(), "graph: got object, expected one of"),
    ],
)
def test_graphs_that_do_not_serve(graph, message):
    with pytest.raises(UsageError, match=message):
        on_virtual_ranks(4, Gossip(graph))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gossip(period=1.5), "period: got 1.5, expected a whole number"),
        (lambda: Gossip(outer=None), "outer: got None, expected a number"),
        (lambda: GossipAdaptive(theta="0.1"), "theta: got '0.1', expected a number"),
        (lambda: ElasticAdaptive(silence=2.5), "silence: got 2.5, expected a whole number"),
    ],
)
def test_numbers_that_are_none(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_ranks_that_do_not_fit():
    with pytest.raises(UsageError, match="graph: got matching on 3 ranks"):
        on_virtual_ranks(3, "gossip:graph=matching")
    with pytest.raises(UsageError, match=r"alpha: got 0\.5 on 4 ranks, expected at most"):
        on_virtual_ranks(4, ElasticAdaptive(alpha=0.5))


def test_a_graph_of_ones_own():
    ring = [np.roll(np.eye(5), shift, axis=0) / 3 for shift in (-1, 0, 1)]
    given = walks()
    found = mixed(Gossip(sum(ring)), 5, 30, given)
    np.testing.assert_allclose(np.mean([params for params, *_ in found], axis=0), sums(5, 30, given), atol=1e-12)
    assert [meter.messages for *_, meter in found] == [2 * 30 + 1] * 5
