"""Training over real verbs, by ranks that believe to be on a host each: the bits of the same strategy over MPI."""

from __future__ import annotations

import numpy as np
import pytest

import mpiddl
from mpiddl.bench import communicator as bench
from mpiddl.collectives.buckets import Buckets
from mpiddl.strategies.synchronous import auto
from mpiddl.training.memory_plan import plan
from mpiddl.training.request import Request
from mpiddl.transport.mpi import MpiComm
from mpiddl.transport.verbs.device import VerbsDevice
from mpiddl.tuning import Choice, Place

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.limit(200)]

JOB = {"data": "digits", "hidden": (64,), "epochs": 1, "max_steps": 6, "batch": 60, "rate": 0.05, "quiet": True}


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    monkeypatch.setattr(MpiComm, "nodes", lambda self: list(range(self.size)))


@pytest.fixture
def posted(monkeypatch):
    """Bytes that were handed to the device."""
    counted, post = [0], VerbsDevice.post

    def counting(self, peer, request):
        counted[0] += request.local.nbytes
        post(self, peer, request)

    monkeypatch.setattr(VerbsDevice, "post", counting)
    return counted


def weights(result):
    return np.concatenate([array.ravel() for array in result.params.values()])


@pytest.mark.parametrize("strategy", ["ring", "ring:overlap=1", "two-step", "two-step:form=leader"])
def test_the_bits_of_the_same_strategy_over_mpi(comm, posted, strategy):
    theirs = weights(mpiddl.train("mlp", comm=comm, strategy=strategy, **JOB))
    assert posted[0] == 0
    way = f"{strategy}{',' if ':' in strategy else ':'}transport=verbs"
    ours = weights(mpiddl.train("mlp", comm=comm, strategy=way, **JOB))
    assert ours.tobytes() == theirs.tobytes()
    assert posted[0] > JOB["max_steps"] * ours.nbytes // 2


def test_buckets_of_auto(comm, posted, monkeypatch):
    theirs = weights(mpiddl.train("mlp", comm=comm, strategy="allreduce", **JOB))
    monkeypatch.setattr(auto, "choose", lambda comm, nbytes: Choice("buckets-verbs", "for the test"))
    ours = weights(mpiddl.train("mlp", comm=comm, strategy="auto", **JOB))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert posted[0] > JOB["max_steps"] * ours.nbytes // 2


def test_buckets_are_sums(link):
    buckets = Buckets(link, 100_003, np.dtype("d"), transport="verbs")
    for turn in range(3):
        buckets.input[:] = np.arange(100_003) * (link.rank + 1) + turn
        for begin, end in ((50_000, 100_003), (7, 50_000), (0, 7)):
            buckets.start(begin, end)
        buckets.wait()
        size = link.size
        np.testing.assert_array_equal(buckets.result, np.arange(100_003) * size * (size + 1) / 2 + size * turn)
    buckets.Free()


def test_tune_measures_messages(link):
    found = bench._message(link, Place("cluster", "processor", "library", "1+1"), 0.0)
    assert found.sizes == bench.MESSAGES and found.seconds.keys() == {"library", "eager-verbs", "rendezvous-verbs"}


@pytest.mark.parametrize(("rule", "direct"), [("asgd", True), ("dc-asgd-a", False)])
def test_plan_memory_tells_where_servers_keep_parameters(link, rule, direct):
    settings = {"data": "digits", "batch": 60, "strategy": f"{rule}:communication=one-sided"}
    found = plan(link, Request(quiet=True, settings=settings))
    placed = {row.placed for row in found.rows if row.crosses == "parameters"}
    assert placed == {"shared memory of the servers' nodes" + ", registered for verbs" * direct}


@pytest.mark.parametrize("rule", ["asgd", "dc-asgd-a", "ddc-asgd"])
def test_parameter_servers(comm, posted, rule):
    """Of these rules, asgd and ddc-asgd read the shards themselves; dc-asgd-a needs what was pulled."""
    result = mpiddl.train("mlp", comm=comm, strategy=f"{rule}:communication=one-sided", **{**JOB, "max_steps": 12})
    assert result.summary["strategy"] and np.isfinite(weights(result)).all()
    assert len(set(comm.allgather(weights(result).tobytes()))) == 1
    pushed = comm.allreduce(posted[0])
    assert pushed > 12 * weights(result).nbytes  # out and back, but for each rank's own shard
