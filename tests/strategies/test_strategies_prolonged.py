"""Runs of a parameter server that are continued: by more epochs, on another number of ranks, with another strategy."""

from __future__ import annotations

import pytest
from harness.short_runs import JOB, weights

import mpiddl

pytestmark = pytest.mark.no_mpi

LENGTH = 22
"""Steps of an epoch of the digits."""


def given(strategy, epochs, out, **more):
    return {**JOB, "optimiser": "sgd", "rate": 0.02, "batch": 60, "strategy": strategy, "epochs": epochs, "out": out, **more}


def simulated(size, strategy, epochs, out, **more):
    return mpiddl.train("mlp", "digits", simulate=size, **given(strategy, epochs, out, **more))


@pytest.mark.parametrize("strategy", ["asgd", "asgd:servers=2", "ssp:bound=1"])
@pytest.mark.parametrize("size", [4, 6])
def test_more_epochs_take_the_steps_that_are_left(tmp_path, strategy, size):
    simulated(4, strategy, 1, tmp_path, jitter=0.3)
    longer = simulated(size, strategy, 3, tmp_path, jitter=0.3, resume=True)
    workers = size - (2 if "servers" in strategy else 1)
    assert longer.summary["steps"] == 3 * LENGTH and longer.summary["epochs"] == 3
    assert longer.summary["staleness"]["pushes"] == 2 * LENGTH * workers
    again = simulated(size, strategy, 3, tmp_path, resume=True)
    assert weights(again).tobytes() == weights(longer).tobytes() and again.summary["staleness"]["pushes"] == 0


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["one-sided", "two-sided"])
def test_one_worker_goes_on_with_the_rate_of_the_step(comm, tmp_path_factory, way):
    """Plain SGD has nothing else to remember: two parts are the whole."""
    out = comm.bcast(tmp_path_factory.mktemp("run") if comm.rank == 0 else None)
    if comm.size != (1 if way == "one-sided" else 2):
        pytest.skip("wants one worker")
    strategy = f"asgd:communication={way}"
    for steps in (10, 0):
        parts = mpiddl.train("mlp", "digits", comm=comm, **given(strategy, 1, out, max_steps=steps, resume=True))
    whole = mpiddl.train("mlp", "digits", comm=comm, **given(strategy, 1, None))
    assert weights(parts).tobytes() == weights(whole).tobytes()


@pytest.mark.parametrize(("first", "then"), [("asgd", "allreduce"), ("asgd", "staleness-aware"), ("allreduce", "asgd"),
                                             ("asgd", "local-sgd")])
def test_another_strategy_goes_on(tmp_path, first, then):
    simulated(4, first, 1, tmp_path, slow="0:5")
    longer = simulated(4, then, 2, tmp_path, resume=True)
    assert longer.summary["steps"] == 2 * LENGTH


@pytest.mark.mpi
def test_ranks_of_different_speed_go_on_together(comm, tmp_path_factory):
    out = comm.bcast(tmp_path_factory.mktemp("run") if comm.rank == 0 else None)
    first = mpiddl.train("mlp", "digits", comm=comm, **given("asgd", 1, out, slow="0:5"))
    longer = mpiddl.train("mlp", "digits", comm=comm, **given("asgd", 2, out, resume=True))
    assert (first.summary["steps"], longer.summary["steps"]) == (LENGTH, 2 * LENGTH)
    assert longer.summary["staleness"]["pushes"] == LENGTH * comm.size
    together = mpiddl.train("mlp", "digits", comm=comm, **given("allreduce", 3, out, resume=True))
    assert together.summary["steps"] == 3 * LENGTH
