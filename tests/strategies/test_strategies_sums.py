"""Strategies that sum gradients by our own collectives take the steps of `allreduce`, wherever their ranks are."""

from __future__ import annotations

import numpy as np
import pytest

import mpiddl
from mpiddl.errors import UsageError
from mpiddl.optim import SGD
from mpiddl.strategies import Replica, Step, make_strategy
from mpiddl.transport import virtual
from mpiddl.transport.mpi import MpiComm

pytestmark = pytest.mark.no_mpi

JOB = {"epochs": 2, "batch": 60, "rate": 0.02, "quiet": True, "dtype": "float64"}
SUMS = ["two-step", "two-step:form=leader", "ring", "ring:overlap=1"]
OVER_VERBS = ["two-step:transport=verbs", "ring:transport=verbs", "ring:overlap=1,transport=verbs"]
LAYOUTS = [(0, 0, 0), (0, 1, 2), (0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 2, 2)]


def weights(result):
    return np.concatenate([array.ravel() for array in result.params.values()])


def on_nodes(nodes, strategy, **settings):
    job = {**JOB, **settings}
    return virtual.run(len(nodes), lambda comm: mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, **job), nodes)


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
@pytest.mark.parametrize("strategy", SUMS)
def test_steps_of_allreduce_on_any_nodes(strategy, nodes):
    results = on_nodes(nodes, strategy)
    assert len({weights(result).tobytes() for result in results}) == 1
    assert distance(weights(results[0]), weights(on_nodes(nodes, "allreduce")[0])) < 1e-12


@pytest.mark.mpi(min_size=2)
def test_the_last_part_of_a_gradient_is_waited_for(comm, link):
    """The first rank waits in ``combine`` for others that have not started yet."""
    strategy, step, replica = make_strategy("ring:overlap=1"), Step(0, 1, comm.size, 0.1), Replica(np.zeros(7), {})
    for late in (False, True):
        grad = np.full(7, 1.0 + comm.rank)
        if late and comm.rank:
            comm.recv(source=0)
        state = strategy.start(link, {}, grad, slice(0, 7), step)
        if late and comm.rank == 0:
            for rank in range(1, comm.size):
                comm.send(None, rank)
        found = set(strategy.combine(link, state, grad, replica, step).grad)
        state["moving"][0].Wait()  # the other ranks must not hang if the assertion fails
        assert found == {sum(range(comm.size + 1))}


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("strategy", SUMS)
def test_steps_of_allreduce_on_real_ranks(comm, strategy):
    ours, again, theirs = (mpiddl.train("mlp", "digits", comm=comm, strategy=name, **JOB)
                           for name in (strategy, strategy, "allreduce"))
    assert len(set(comm.allgather(weights(ours).tobytes()))) == 1
    assert weights(ours).tobytes() == weights(again).tobytes()
    assert distance(weights(ours), weights(theirs)) < 1e-12


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore:verbs")
@pytest.mark.parametrize("strategy", OVER_VERBS)
def test_without_verbs_messages_go_over_mpi(comm, monkeypatch, strategy):
    monkeypatch.setattr(MpiComm, "nodes", lambda self: list(range(self.size)))
    monkeypatch.setenv("MPIDDL_VERBS", "off")
    ours, theirs = (mpiddl.train("mlp", "digits", comm=comm, strategy=name, **JOB)
                    for name in (strategy, strategy.replace("transport=verbs", "transport=mpi")))
    assert weights(ours).tobytes() == weights(theirs).tobytes()


@pytest.mark.parametrize("strategy", ["two-step", "ring"])
def test_a_transport_that_there_is_not(strategy):
    with pytest.raises(UsageError, match="transport: got 'tcp', expected mpi or verbs"):
        make_strategy(f"{strategy}:transport=tcp").check(2)


@pytest.mark.mpi(min_size=2)
def test_clipping_and_adam_take_the_sum_of_the_node(comm):
    job = {**JOB, "clip": 0.5, "optimiser": "adam", "rate": 0.001, "dtype": "float32"}
    ours, theirs = (mpiddl.train("mlp", "digits", comm=comm, strategy=name, **job) for name in ("two-step", "allreduce"))
    assert distance(weights(ours), weights(theirs)) < 1e-3


def test_bytes_are_those_of_the_algorithms():
    size = 8 * (64 * 64 + 64 + 64 * 10 + 10)
    steps = on_nodes((0, 0), "two-step")[0].summary["steps"]
    sent = {(name, nodes): on_nodes(nodes, name)[0].summary["bytes_sent"]
            for name in SUMS for nodes in ((0, 0), (0, 1), (0, 0, 1, 1))}
    assert sent["two-step", (0, 0)] == sent["two-step:form=leader", (0, 0)] == 0
    for name in SUMS:
        assert sent[name, (0, 1)] == 2 * size * steps  # (N-1)/N V twice, by both
    assert sent["two-step", (0, 0, 1, 1)] == sent["two-step:form=leader", (0, 0, 1, 1)] == 2 * size * steps
    assert sent["ring", (0, 0, 1, 1)] == 6 * size * steps


def test_the_sum_of_a_node_cannot_be_written():
    """All its ranks read it."""

    class Scaling(SGD):
        def update(self, params, grad, *rest):
            grad *= 0.5

    with pytest.raises(ValueError, match="read-only"):
        on_nodes((0, 0), "two-step", optimiser=Scaling(momentum=0.0))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("strategy", ["two-step", "ring:overlap=1"])
def test_resumed_with_the_bits_of_a_run_that_was_not_stopped(comm, tmp_path, strategy):
    folder = comm.bcast(str(tmp_path))
    whole = mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, **JOB)
    mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, out=folder, max_steps=25, **JOB)
    resumed = mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, out=folder, resume=True, max_steps=0, **JOB)
    assert weights(resumed).tobytes() == weights(whole).tobytes()


@pytest.mark.parametrize("spec", ["two-step:form=round", "ring:overlap=yes", "two-step:leader=1"])
def test_parameters_that_make_no_sense(spec):
    with pytest.raises(UsageError, match=r"expected (slices or leader|a value of type int|parameters among form=slices)"):
        mpiddl.train("mlp", "digits", strategy=spec, **JOB)
