"""What a run tells of its traffic: bytes and distance at each validation, a budget of bytes, and what hosts' links carry."""

from __future__ import annotations

import numpy as np
import pytest

import mpiddl
from mpiddl.machine.link_counters import Link
from mpiddl.strategies import LocalSGD
from mpiddl.training.link_traffic import Traffic
from mpiddl.transport import virtual

SMALL = {"model": "softmax", "data": "digits", "quiet": True, "epochs": 3}


def validations(strategy, **settings):
    result = mpiddl.train(strategy=strategy, simulate=4, **{**SMALL, **settings})
    return [line for line in result.history if "validation_loss" in line], result


@pytest.mark.no_mpi
@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:period=8", "asgd", "delayed"])
def test_validations_tell_all_ranks_bytes_and_how_far_they_are_apart(strategy):
    lines, result = validations(strategy, rate=0.01)
    whole = sum(rank["bytes"] for rank in result.summary["per_rank"])
    assert len(lines) == 3 and [line["epoch"] for line in lines] == [1, 2, 3]
    assert 0 < lines[0]["bytes"] < lines[1]["bytes"] < lines[2]["bytes"] <= whole < 1.2 * lines[2]["bytes"]
    apart = [line["distance"] for line in lines]
    assert apart[:2] == [0, 0] if strategy == "allreduce" else all(0 < distance < 1 for distance in apart[:2])
    assert all(line["aside"] == 0 for line in lines)  # on the simulated clock looking takes no time


@pytest.mark.no_mpi
@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:period=8", "asgd"])
def test_validations_every_so_many_steps(strategy):
    def steps(every):
        return [21 * line["epoch"] for line in validations(strategy, rate=0.01, epochs=2, validate_every=every)[0]]

    assert steps(7) == pytest.approx([7, 14, 21, 28, 35, 42], abs=0.01)
    assert steps(10) == pytest.approx([10, 20, 30, 40, 42], abs=0.01)
    assert steps(10**9) == pytest.approx([42], abs=0.01)


@pytest.mark.no_mpi
@pytest.mark.parametrize(("settings", "checkpoints", "steps"), [
    ({"validate_every": 10**9}, 3, [21, 42, 63]),  # checkpoints are written after each epoch, and the ranks meet for them
    ({"validate_every": 5, "checkpoint_every": 20}, 4, None),
])  # fmt: skip
def test_ranks_at_their_own_pace_meet_as_often_as_checkpoints_and_validations_ask_for(tmp_path, settings, checkpoints, steps):
    lines, _ = validations("asgd", rate=0.01, out=tmp_path, keep=99, **settings)
    found = [round(21 * line["epoch"]) for line in lines]
    assert found == (steps or [*range(5, 61, 5), 63])
    assert len(list((tmp_path / "checkpoints").iterdir())) >= checkpoints


@pytest.mark.no_mpi
def test_the_last_validation_is_not_made_twice():
    lines, result = validations("allreduce", rate=0.01, epochs=1, validate_every=4, max_seconds=20.5)
    assert [line["step"] for line in lines] == [4, 8, 12, 16, 20, 21] and result.summary["ended"]


@pytest.mark.no_mpi
def test_a_target_between_two_epochs_ends_the_run():
    lines, result = validations("allreduce", rate=0.1, validate_every=5, target_accuracy=0.8)
    assert lines[-1]["validation_accuracy"] >= 0.8 > lines[-2]["validation_accuracy"]
    assert result.summary["steps"] == lines[-1]["step"] == 5 * len(lines) < 21


@pytest.mark.no_mpi
def test_distance_is_the_quadratic_mean():
    """One step of SGD each, of nothing in common: what they are apart can be made by hand."""
    lines, result = validations("local-sgd:period=100", max_steps=1, optimiser="sgd", rate=0.5, schedule="constant")
    mean = np.concatenate([part.ravel() for part in result.params.values()])
    found = virtual.run(4, step_alone)
    assert mean == pytest.approx(np.mean(found, axis=0), rel=1e-4, abs=1e-6)
    apart = np.sqrt(np.mean([np.sum((each - mean) ** 2) for each in found])) / np.linalg.norm(mean)
    assert lines[0]["distance"] == pytest.approx(apart, rel=1e-3)


def step_alone(comm):
    """What this rank has after its step, before the average at the end."""
    kept = []

    class Kept(LocalSGD):
        def finish(self, comm, state, replica):
            kept.append(replica.params.copy())
            super().finish(comm, state, replica)

    mpiddl.train(strategy=Kept(period=100), comm=comm, **SMALL, max_steps=1, optimiser="sgd", rate=0.5, schedule="constant")
    return kept[0]


@pytest.mark.no_mpi
@pytest.mark.parametrize(("strategy", "most"), [("allreduce", 1.05), ("local-sgd:period=4", 1.2), ("asgd", 1.5)])
def test_a_budget_of_bytes(strategy, most):
    whole = validations(strategy, rate=0.01)[1].summary
    budget = whole["bytes_sent"] // 2
    cut = validations(strategy, rate=0.01, max_bytes=budget)[1].summary
    assert cut["ended"] == f"{budget} bytes are sent" and 0 < cut["steps"] < whole["steps"]
    assert budget <= sum(rank["bytes"] for rank in cut["per_rank"]) < most * budget


class Ranks:
    """Four ranks on two hosts, seen from rank 2."""

    rank, size, processes = 2, 4, True

    def nodes(self):
        return [0, 0, 2, 2]

    def Barrier(self):
        pass

    def allgather(self, mine):
        return [(1, 2, 3, 4), None, mine, None]


@pytest.mark.no_mpi
def test_what_is_aside_is_not_counted():
    carried = iter([Link(100, 10, 1, 2), Link(150, 20, 3, 4), Link(250, 50, 5, 7), Link(300, 60, 9, 12), Link(300, 60, 9, 12)])
    traffic = Traffic(Ranks(), lambda: next(carried))
    with traffic.aside():
        pass
    assert traffic.hosts() == [{"sent": 1, "received": 2, "packets": 3}, {"sent": 100, "received": 20, "packets": 6}]


@pytest.mark.no_mpi
def test_one_host_has_no_links_to_count():
    class One(Ranks):
        def nodes(self):
            return [0] * 4

        def allgather(self, mine):
            return [mine] * 4

    assert Traffic(One(), None).hosts() == []
