"""The reproducible mode: the same weights, bit for bit, on any number of ranks that it takes, on either MPI, after a resume."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from harness import jobs
from harness.reductions import serial

import mpiddl
from mpiddl.cli import main
from mpiddl.data import ShardedRows, open_data
from mpiddl.errors import UsageError
from mpiddl.layout import Layout, rank_shards
from mpiddl.memory import FlatBuffer
from mpiddl.models import MLP
from mpiddl.optim import SGD
from mpiddl.strategies import AllReduce, Placement, Strategy, chain
from mpiddl.transport import virtual

JOB = {"epochs": 2, "batch": 50, "max_steps": 30, "hidden": (32,), "quiet": True, "reproducible": True}
OTHER_PYTHON = os.environ.get("MPIDDL_TEST_OTHER_PYTHON", "")


def weights(result):
    return b"".join(array.tobytes() for array in result.params.values())


def on(size, *args, nodes=None, **settings):
    """The weights after training on virtual ranks, which must be the same bits on all of them."""
    args = args or ("mlp", "digits")
    results = virtual.run(size, lambda comm: mpiddl.train(*args, comm=comm, **{**JOB, **settings}), nodes)
    (found,) = {weights(result) for result in results}
    return found


class Linear:
    """A user's model, whose sums are a library's."""

    def __init__(self, features, start=0.0):
        self.shapes, self.start = {"w": (features, 3)}, start

    def init(self, params, rng):
        params["w"][:] = self.start

    def gradient(self, params, x, y, grad):
        error = x @ params["w"] - y[:, None]
        grad["w"][:] = x.T @ error
        return (error * error).sum() / 2

    def predict(self, params, x):
        return x @ params["w"]


ALL = {"ragged last batch": {"max_steps": 0}, "fewer samples than shards": {"batch": 5}}
CASES = {
    "clip": {"clip": 0.5, "batch": 37},
    "adam": {"optimiser": "adam", "weight_decay": 0.01},
    "nesterov, warm-up, tanh": {"optimiser": "nesterov", "warmup": 0.5, "activation": "tanh"},
    "float64": {"dtype": "float64"},
    "two-step": {"strategy": "two-step"},
}


@pytest.mark.parametrize("case", ALL)
def test_the_same_bits_on_any_number_of_ranks(case):
    assert len({on(size, **ALL[case]) for size in (1, 2, 4, 8, 16)}) == 1


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_whatever_the_rules_of_the_run(case):
    assert len({on(size, max_steps=12, **CASES[case]) for size in (1, 4, 16)}) == 1


@pytest.mark.parametrize("nodes", [(0, 1, 0, 1), (0, 0, 1, 1), (0, 0, 0, 1)], ids=str)
def test_wherever_the_ranks_are(nodes):
    assert on(4, nodes=nodes) == on(1)


def test_without_the_mode_bits_differ():
    """Else nothing here could fail."""
    found = [on(size, reproducible=False) for size in (1, 2, 4)]
    assert len(set(found)) == 3 and on(1) not in found


def test_models_that_call_a_library_and_shards_without_rows():
    rng = np.random.default_rng(0)
    for rows in (9, 203):  # nine rows: seven of the shards have none
        x, y = rng.standard_normal((rows, 70)), rng.standard_normal(rows)
        job = {"batch": 7, "rate": 0.001, "validation": 0.0, "test_fraction": 0.0}
        assert len({on(size, Linear(70), (x, y), **job) for size in (1, 2, 4, 8, 16)}) == 1


def test_a_model_is_asked_in_the_same_way_however_many_shards_a_rank_holds():
    rng = np.random.default_rng(0)
    x, y, called = rng.standard_normal((99, 4)), rng.standard_normal(99), set()

    class Asked(Linear):
        def gradient(self, params, x, y, grad, ready=None):
            called.add(ready is None)
            return super().gradient(params, x, y, grad)

    for size in (1, 16):
        on(size, Asked(4), (x, y), batch=32, rate=0.001)
    assert called == {True}


def test_zeros_keep_their_signs():
    """A gradient of -0 from shards with rows, +0 from those without, and a weight that shows which of them came out."""

    class Minus(Linear):
        def gradient(self, params, x, y, grad):
            grad["w"][:] = -0.0 if len(x) else 0.0
            return 0.0

    x, y = np.zeros((40, 2)), np.zeros(40)
    for batch in (3, 40):
        job = {"batch": batch, "validation": 0.0, "test_fraction": 0.0, "optimiser": "sgd"}
        assert len({on(size, Minus(2, -0.0), (x, y), **job) for size in (1, 2, 4, 8, 16)}) == 1


def test_a_target_ends_all_runs_at_the_same_step():
    job = {"epochs": 30, "max_steps": 0, "target_accuracy": 0.85}
    assert len({on(size, **job) for size in (1, 4, 16)}) == 1


@pytest.mark.parametrize("shards", [1, 8, 16])
@pytest.mark.parametrize("batch", [5, 50])
def test_the_gradient_is_the_serial_tree_of_the_shards_gradients(shards, batch):
    data, seen = open_data("digits"), []

    class Listening(SGD):
        def update(self, params, grad, *rest):
            seen.append(grad.copy())
            super().update(params, grad, *rest)

    model = MLP((64, 16, 10))
    mpiddl.train(model, data, optimiser=Listening(), **{**JOB, "max_steps": 1, "shards": shards, "batch": batch})
    held = ShardedRows(data.train, Layout(data.train.n, shards, batch, 0.1), range(shards))
    params, leaves = FlatBuffer(model.shapes, "float32"), []
    params.flat[:] = start_of(model, data)
    for x, y in held.batch_by_shard(0, 0):
        leaves.append(FlatBuffer(model.shapes, "float32"))
        model.gradient(params.views, x, y, leaves[-1].views)
    assert seen[-1].tobytes() == serial([leaf.flat for leaf in leaves]).tobytes()


class Apart(AllReduce):
    """A sum into the gradient's own place, of which the last ``idle`` ranks have no shards."""

    by_shard, idle = True, 0

    def placement(self, shards, rank, size):
        busy = size - self.idle
        return Placement(rank_shards(shards, busy, rank) if rank < busy else [])


class Idle(Apart):
    idle = 1


def test_a_rank_without_shards_adds_nothing():
    job = {"reproducible": False, "shards": 4}
    assert on(3, strategy=Idle(), **job) == on(2, strategy=Apart(), **job)


def start_of(model, data):
    result = mpiddl.train(model, data, **{**JOB, "epochs": 0})
    return np.concatenate([array.ravel() for array in result.params.values()])


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("strategy", ["allreduce", "ring"])
def test_real_ranks_have_the_bits_of_one(comm, strategy):
    if 16 % comm.size:
        with pytest.raises(UsageError, match=f"got 16 shards on {comm.size} ranks"):
            mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, **JOB)
    else:
        assert weights(mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, **JOB)) == on(1)


@pytest.mark.parametrize(("first", "second", "third"), [(4, 2, 8), (1, 16, 4)])
def test_resumed_on_other_ranks(tmp_path, first, second, third):
    job = {"optimiser": "adam", "epochs": 3, "max_steps": 0}
    on(first, out=tmp_path, **{**job, "max_steps": 20})
    on(second, out=tmp_path, resume=True, **{**job, "max_steps": 45})
    assert on(third, out=tmp_path, resume=True, **job) == on(1, **job)


def test_a_resume_refuses_other_shards(tmp_path):
    job = {"data": "digits", "epochs": 1, "max_steps": 2, "quiet": True, "out": tmp_path}
    mpiddl.train(**job)
    with pytest.raises(UsageError, match=r"shards: got 8, expected 16 as in the run that is resumed"):
        mpiddl.train(**{**job, "max_steps": 4}, shards=8, resume=True)


def test_a_resume_keeps_the_mode_and_its_shards(tmp_path):
    job = {"epochs": 2, "batch": 50, "hidden": (32,), "quiet": True}
    on(2, out=tmp_path, shards=8, max_steps=20)
    for other, message in [({"reproducible": False}, "reproducible: got False, expected True as at the start of the run in"),
                           ({}, "got 8 shards on 16 ranks, expected 1, 2, 4 or 8 ranks")]:
        with pytest.raises(UsageError, match=message):
            virtual.run(16, lambda comm, other=other: mpiddl.train("mlp", "digits", comm=comm, out=tmp_path, resume=True,
                                                                   **{**job, **other}))
    job |= {"max_steps": 30, "out": tmp_path, "resume": True}
    resumed = virtual.run(4, lambda comm: mpiddl.train("mlp", "digits", comm=comm, **job))
    assert resumed[0].summary["reproducible"] and weights(resumed[0]) == on(1, shards=8)


def test_a_run_without_the_mode_is_not_resumed_with_it(tmp_path):
    on(2, out=tmp_path, reproducible=False)
    with pytest.raises(UsageError, match=r"reproducible: got True, expected False as at the start of the run in"):
        on(2, out=tmp_path, resume=True)


class Halving(AllReduce):
    """Derived from a sum, and more than that."""


MISTAKES = [
    (3, {}, r"got 16 shards on 3 ranks, expected 1, 2, 4, 8 or 16 ranks$"),
    (17, {}, r"got 16 shards on 17 ranks, .* 8 or 16 ranks, or more `shards`"),
    (4, {"shards": 12}, "got 12 shards, expected a power of two, such as 8 or 16"),
    (4, {"shards": 2}, "got 2 shards on 4 ranks, expected 1 or 2 ranks, or more"),
    (2, {"strategy": "local-sgd"}, r"got strategy LocalSGD\(period=8\), expected a strategy that only sums gradients"),
    (2, {"strategy": Strategy()}, r"got strategy Strategy\(\), expected a strategy that only sums"),
    (2, {"strategy": Halving()}, r"got strategy Halving\(\), expected a strategy that only sums"),
    (2, {"strategy": chain(AllReduce(), Strategy())}, "got strategy chain"),
    (2, {"threads": 4}, "threads: got 4, expected 1"),
    (2, {"reproducible": 1}, "reproducible: got 1, expected true or false"),
]


@pytest.mark.parametrize(("size", "settings", "message"), MISTAKES)
def test_what_the_mode_cannot_do_is_told(size, settings, message):
    with pytest.raises(UsageError, match=message):
        on(size, **settings)


def checksum(done, run):
    """Of the run's last checkpoint; the command has told it, too."""
    assert done.returncode == 0, done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert f"reproducible: the SHA-256 of the weights is {summary['checkpoint_sha256']}" in done.stdout
    return summary["checkpoint_sha256"]


TRAIN = ("train", "--epochs", "2", "--hidden", "32", "--reproducible")


def other_mpi(size, *words):
    """The command of the environment with the other MPI library, by its own launcher."""
    env = jobs.environment(OTHER_PYTHON)
    return jobs.run(jobs.mpi_command(size, [str(Path(OTHER_PYTHON).with_name("mpiddl")), *map(str, words)], env), env, 50)


@pytest.mark.more
def test_checkpoints_of_the_command_on_any_ranks_and_either_library(mpirun, tmp_path):
    job = {"epochs": 2, "hidden": (32,), "quiet": True, "reproducible": True}
    wanted = mpiddl.train("mlp", "digits", **job).summary["checkpoint_sha256"]
    run = tmp_path / "run"
    assert checksum(mpirun(4, "mpiddl", *TRAIN, "--out", run, "--max-steps", "25"), run) != wanted
    go_on = other_mpi if OTHER_PYTHON else lambda size, *words: mpirun(size, "mpiddl", *words)
    assert checksum(go_on(2, *TRAIN, "--out", run, "--resume", "--max-steps", "0"), run) == wanted
    (newest,) = (run / "checkpoints").glob("step-00000042")
    assert hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest() == wanted


def test_mistakes_of_the_command_are_told_once(mpirun, tmp_path):
    done = mpirun(3, "mpiddl", *TRAIN, "--out", tmp_path / "run")
    assert done.returncode == 2 and done.stderr.count("reproducible: got 16 shards on 3 ranks") == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("flags", "said"), [((), "True"), (("--no-reproducible",), "False")])
def test_a_job_file_may_ask_for_the_mode_and_a_flag_wins(tmp_path, capsys, flags, said):
    job = tmp_path / "job.toml"
    job.write_text("reproducible = true\n")
    with pytest.raises(SystemExit, match="0"):
        main(["train", str(job), "--dry-run", *flags])
    assert f"reproducible     {said}\n" in capsys.readouterr().out


@pytest.mark.more
def test_the_bench_tells_cost_and_checksum(mpirun, tmp_path):
    flags = ("--seconds", "0", "--steps", "5", "--hidden", "8", "--json", tmp_path / "rows.json")
    done = mpirun(2, "mpiddl", "bench", "reproducible", *flags)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == ["allreduce", "reproducible"]
    assert f"after 5 steps: {rows[1]['sha256']}" in done.stdout
    job = {"hidden": (8,), "batch": 64, "max_steps": 5, "epochs": 1_000_000, "schedule": "constant"}
    assert mpiddl.train("mlp", "digits", **{**JOB, **job}).summary["checkpoint_sha256"] == rows[1]["sha256"]
