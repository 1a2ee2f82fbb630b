"""Ranks with fewer rows than others, or none: each sample has the same weight, and ranks without rows do not count."""

from __future__ import annotations

import numpy as np
import pytest
from harness.short_runs import distance, weights

import mpiddl
from mpiddl.errors import UsageError
from mpiddl.strategies import ASGD, AllReduce, Gossip, LocalSGD, Ring, Strategy, chain
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

X, Y = np.random.default_rng(0).standard_normal((240, 6)), np.arange(240) % 3
JOB = {"hidden": (5,), "rate": 0.05, "quiet": True, "dtype": "float64", "test_fraction": 0.0, "log_every": 1000}

# Their law: with plain SGD they take the steps of allreduce, to rounding.
LIKE_ALLREDUCE = ["local-sgd:period=1", "local-sgd:period=3,after=100000", "hierarchical:period=1,delay=0",
                  "gossip:graph=complete", "gossip-adaptive:graph=complete,theta=0",
                  "gossip-scheduled:graph=complete,share=1,power=1"]

# Averages over several steps.
AVERAGES = ["local-sgd:period=3", "local-sgd:period=3,delay=1", "local-sgd:period=2,momentum=average", "local-sgd:outer=0.3",
            "hierarchical:period=3", "gossip", "gossip:graph=ring,direction=push", "gossip:graph=complete,direction=pull",
            "gossip:graph=matching", "gossip:average=3,momentum=average", "gossip:outer=0.3", "gossip:graph=complete,bits=8",
            "gossip-adaptive:theta=0.001", "gossip-adaptive:graph=ring,direction=push,theta=0.001",
            "gossip-adaptive:graph=complete,traffic=0.5", "elastic:period=2", "elastic-adaptive:theta=0.001"]


def trained(size, strategy, nodes=None, **settings):
    job = {**JOB, "epochs": 2, "optimiser": "sgd", **settings}
    return virtual.run(size, lambda comm: mpiddl.train("mlp", (X, Y), comm=comm, strategy=strategy, **job), nodes)[0]


@pytest.mark.parametrize("size, batch", [(3, 2), (3, 1), (5, 3), (5, 2), (6, 6), (6, 3), (6, 2), (12, 12), (12, 6), (12, 4)])
@pytest.mark.parametrize("strategy", LIKE_ALLREDUCE)
def test_steps_of_allreduce_with_fewer_rows_than_ranks_in_a_batch(strategy, size, batch):
    nodes = [rank // 2 for rank in range(size)] if "hierarchical" in strategy else None
    found = trained(size, strategy, nodes, batch=batch, epochs=1)
    assert distance(weights(found), weights(trained(1, "allreduce", batch=batch, epochs=1, shards=max(size, 16)))) < 1e-11


def resumed(folder, size, strategy, **settings):
    """The result of a run of 4 shards that goes on with ``size`` ranks."""
    job = {"shards": 4, "batch": 24, "optimiser": "momentum", "out": folder / f"{str(strategy)[:40]}-{size}", **settings}
    nodes = [rank // 2 for rank in range(size)]
    trained(4, "allreduce", max_steps=2, **job)
    return trained(size, strategy, nodes, resume=True, max_steps=0, **job)


def test_the_only_row_of_a_last_batch_makes_no_longer_update():
    """With a factor of 16 the one rank with a row would leave the others far behind."""
    job = {"batch": 239, "epochs": 1, "validation": 0.0}
    before, after = (weights(trained(16, "local-sgd:period=1", max_steps=steps, **job)) for steps in (1, 2))
    first, second = (weights(trained(1, "allreduce", max_steps=steps, **job)) for steps in (1, 2))
    np.testing.assert_allclose(16 * (after - before), second - first, rtol=1e-6, atol=1e-12)


CHAINS = chain(LocalSGD(1), Strategy()), chain(AllReduce(), LocalSGD(1)), chain(LocalSGD(1), Ring())


@pytest.mark.parametrize("strategy", CHAINS, ids=str)
def test_in_a_chain_the_rate_belongs_to_the_ranks_own_rows(strategy):
    for batch in (1, 2):
        found, wanted = trained(3, strategy, batch=batch, epochs=1), trained(1, "allreduce", batch=batch, epochs=1)
        assert distance(weights(found), weights(wanted)) < 1e-11


@pytest.mark.parametrize("strategy", AVERAGES)
def test_ranks_without_rows_change_nothing(strategy, tmp_path):
    few, many = resumed(tmp_path, 4, strategy), resumed(tmp_path, 12, strategy)
    assert distance(weights(few), weights(many)) < (1e-2 if "bits" in strategy else 1e-12)


def test_ranks_without_rows_do_not_count_in_a_mean_of_asynchronous_ranks(tmp_path):
    own, together = (resumed(tmp_path, 12, f"{name}period=1000", batch=3) for name in ("gossip:pace=own,", "local-sgd:"))
    assert distance(weights(own), weights(together)) < 1e-12


@pytest.mark.parametrize("rule", [{}, {"direction": "push"}, {"graph": "complete"}], ids=str)
def test_asynchronous_ranks_ask_only_ranks_with_rows(rule, tmp_path):
    asked = []

    class Recording(Gossip):
        def peers(self, number, rank, size):
            found = super().peers(number, rank, size)
            asked.append({rank, *found})
            return found

    resumed(tmp_path, 12, Recording(pace="own", **rule))
    assert set.union(*asked) == {0, 1, 2, 3}


def test_workers_of_a_server_push_only_gradients_of_rows():
    pushed = []

    class Counting(ASGD):
        def correct(self, state, push):
            pushed.append(bool(push.grad.any()))
            return 1.0

    result = trained(9, Counting(communication="two-sided"), batch=4, epochs=3, validation=0.0)
    pushes = len(X) * 3 // 2  # a batch of 4 rows has 2 of each of 2 workers, since each of 8 workers has 2 of 16 shards
    assert len(pushed) == result.summary["staleness"]["pushes"] == pushes and all(pushed)
    assert result.summary["epochs"] == 3


def test_a_worker_of_a_server_without_rows_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"ranks: got 6 workers for strategy ASGD.*, expected at most 4: the rows are in 4 "):
        resumed(tmp_path, 7, "asgd:communication=two-sided")


def test_uneven_shards_and_ranks_without_rows_are_told(tmp_path, capsys):
    trained(12, "allreduce", quiet=False, batch=60, epochs=1)
    assert "16 shards on 12 ranks are uneven: some ranks have 2 shards, so that a step takes 1.5 " in (
        said := capsys.readouterr().err)
    assert "`shards=24` divides evenly" in said
    resumed(tmp_path, 12, "allreduce", quiet=False)
    assert "8 of 12 ranks have no rows, because the run has 4 shards: they only wait" in capsys.readouterr().err
    trained(3, "allreduce", quiet=False, batch=60, epochs=1)
    assert "shards" not in capsys.readouterr().err


def test_the_shards_that_suit_a_code_are_told(capsys):
    trained(5, "coded:redundancy=2", quiet=False, batch=60, epochs=1, shards=12)
    assert "`shards=20` divides evenly" in capsys.readouterr().err
    trained(4, "coded-sum:redundancy=2,speeds=measured,transport=unicast", quiet=False, batch=60, epochs=1, slow="3:4")
    assert "uneven" not in capsys.readouterr().err
