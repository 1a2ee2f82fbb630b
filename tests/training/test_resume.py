"""A run that is continued: from an earlier checkpoint if the newest is damaged, and where nothing is left to do."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from harness.tiers import only

import mpiddl
from mpiddl.cli import main
from mpiddl.cli.flags import in_flags
from mpiddl.errors import CheckpointError, DataError, ShapeError, UsageError
from mpiddl.strategies import make_strategy
from mpiddl.strategies.server.parameter_server import ParameterServer
from mpiddl.training.checkpoint import complete, load
from mpiddl.training.inference import predict_run
from mpiddl.training.job import read_job_file
from mpiddl.training.run_folder import Folder
from mpiddl.transport import uncaught, virtual

pytestmark = pytest.mark.no_mpi

SHORT = {"max_steps": 12, "checkpoint_every": 4, "quiet": True}


def damage(path, name="model.safetensors"):
    (path / name).write_bytes((path / name).read_bytes()[:-1] + b"!")


def steps(out):
    return [path.name for path in complete(out / "checkpoints")]


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_names_the_one_before_and_how_to_take_it(tmp_path, name):
    mpiddl.train("mlp", "digits", out=tmp_path, **SHORT)
    newest = complete(tmp_path / "checkpoints")[-1]
    damage(newest, name)
    wanted = f"Continue from the earlier checkpoint {newest.with_name('step-00000008')} with `resume_step=8`"
    with pytest.raises(CheckpointError, match=name) as caught:
        mpiddl.train("mlp", "digits", out=tmp_path, resume=True, **SHORT)
    assert wanted in str(caught.value)
    instead = f"Give the earlier checkpoint {newest.with_name('step-00000008')} instead of the run folder$"
    with pytest.raises(CheckpointError, match=instead):
        mpiddl.load(tmp_path)
    assert mpiddl.load(newest.with_name("step-00000008")).about["step"] == 8


def test_going_on_from_an_earlier_checkpoint_is_as_if_it_were_the_newest(tmp_path):
    whole = mpiddl.train("mlp", "digits", out=tmp_path / "whole", **SHORT)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    damage(complete(tmp_path / "again" / "checkpoints")[-1])
    again = mpiddl.train("mlp", "digits", out=tmp_path / "again", resume_step=4, **SHORT)
    assert again.summary["checkpoint_sha256"] == whole.summary["checkpoint_sha256"]
    assert steps(tmp_path / "again") == steps(tmp_path / "whole")
    told = [[line["step"] for line in Folder(tmp_path / name).read_lines()] for name in ("whole", "again")]
    assert told[0] == told[1]


def test_later_checkpoints_go_when_the_next_is_written(tmp_path):
    """Else a run that is resumed would go on from the one that was given up."""
    mpiddl.train("mlp", "digits", out=tmp_path, **SHORT)
    damage(complete(tmp_path / "checkpoints")[-1])
    mpiddl.train("mlp", "digits", out=tmp_path, resume_step=4, **SHORT | {"max_steps": 6, "keep": 1})
    assert steps(tmp_path) == ["step-00000006"]


def test_checkpoints_of_the_run_before_go_though_their_steps_are_earlier(tmp_path):
    """A later damage would else name one of them."""
    mpiddl.train("mlp", "digits", out=tmp_path, **SHORT | {"max_steps": 7, "checkpoint_every": 1, "keep": 5})
    assert steps(tmp_path) == [f"step-{step:08d}" for step in (3, 4, 5, 6, 7)]
    mpiddl.train("mlp", "digits", out=tmp_path, resume_step=4, **SHORT | {"max_steps": 12, "checkpoint_every": 8, "keep": 5})
    assert steps(tmp_path) == [f"step-{step:08d}" for step in (3, 4, 8, 12)]


def test_what_is_only_called_like_a_checkpoint_is_none(tmp_path):
    mpiddl.train("mlp", "digits", out=tmp_path, **SHORT)
    newest = complete(tmp_path / "checkpoints")[-1]
    damage(newest)
    newest.rename(newest.with_name("step-00000012.bad"))
    assert mpiddl.load(tmp_path).about["step"] == 8


def test_the_usual_rate_may_be_named(tmp_path):
    mpiddl.train("mlp", "digits", out=tmp_path, **SHORT)
    mpiddl.train("mlp", "digits", out=tmp_path, resume=True, rate=0.05, **SHORT | {"max_steps": 13})
    with pytest.raises(UsageError, match=r"rate: got 0.1, expected 0.05 as at the start"):
        mpiddl.train("mlp", "digits", out=tmp_path, resume=True, rate=0.1, **SHORT | {"max_steps": 14})


def test_the_job_file_of_a_run_with_objects_is_not_another_run(tmp_path):
    data = np.random.default_rng(0).random((100, 64)), np.arange(100) % 10
    mpiddl.train(mpiddl.MLP((64, 10)), data, out=tmp_path, **SHORT)
    with pytest.raises(UsageError, match="an object of a program"):
        mpiddl.train(**read_job_file(tmp_path / "job.toml"))


def test_rows_of_a_file_that_do_not_fit_are_told_with_their_shape(tmp_path):
    mpiddl.train("mlp", "digits", out=tmp_path / "run", **SHORT)
    np.save(tmp_path / "x.npy", np.zeros((10, 4)))
    with pytest.raises(ShapeError, match=r"^rows: .*x.npy: got shape \(10, 4\), expected \(n, 64\)"):
        predict_run(tmp_path / "run", f"{tmp_path / 'x.npy'}", tmp_path / "out.npy")
    x = np.zeros((70_000, 64), np.float32)
    x[69_999, 5] = np.nan
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(DataError, match="got nan in row 69999, column 5"):
        predict_run(tmp_path / "run", f"{tmp_path / 'x.npy'}", tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()


def test_a_step_without_a_checkpoint(tmp_path):
    mpiddl.train("mlp", "digits", out=tmp_path, **SHORT)
    with pytest.raises(UsageError, match=r"resume_step: got 5, expected a step in .*checkpoints: 4, 8, 12"):
        mpiddl.train("mlp", "digits", out=tmp_path, resume_step=5, **SHORT)


@pytest.mark.parametrize("step", [-1, "4", True, [4], 4.0])
def test_a_step_that_is_none(tmp_path, step):
    mpiddl.train("mlp", "digits", out=tmp_path, max_steps=1, checkpoint_every=1, quiet=True)
    with pytest.raises(UsageError, match=rf"resume_step: got {re.escape(repr(step))}, expected a whole number, 0 or more"):
        mpiddl.train("mlp", "digits", out=tmp_path, resume_step=step, **SHORT)


def test_a_step_of_a_run_without_checkpoints_and_without_a_folder(tmp_path):
    with pytest.raises(UsageError, match=r"resume_step: got 4, .* there is no checkpoint"):
        mpiddl.train("mlp", "digits", out=tmp_path / "new", resume_step=4, **SHORT)
    with pytest.raises(UsageError, match=r"^resume_step: got no folder, expected the folder of the run: `out=DIR`"):
        mpiddl.train("mlp", "digits", resume_step=4, **SHORT)
    with pytest.raises(UsageError, match=r"^resume_step, overwrite: got 2 options, expected only `resume_step=4` or"):
        mpiddl.train("mlp", "digits", out=tmp_path, resume_step=4, overwrite=True, **SHORT)


DONE = {
    "max_steps": ({"max_steps": 3}, {}, "all 3 steps are done (max_steps: 3); expected a larger `max_steps`, or `max_steps=0`"),
    "epochs": ({"epochs": 1}, {}, "steps are done (epochs: 1); expected a larger `epochs`"),
    "fewer": ({"max_steps": 3}, {"max_steps": 2}, "all 2 steps are done"),
    "more": ({"max_steps": 3}, {"max_steps": 4}, None),
    "own pace": ({"max_steps": 3, "strategy": "ddc-asgd", "optimiser": "nesterov", "simulate": 2}, {}, "all 3 steps are done"),
}


@pytest.mark.parametrize("name", [*DONE])
def test_a_run_that_is_over_says_so_when_it_is_resumed(tmp_path, capsys, name):
    first, then, wanted = DONE[name]
    mpiddl.train("mlp", "digits", out=tmp_path, quiet=True, **first)
    mpiddl.train("mlp", "digits", out=tmp_path, resume=True, **then)
    said = capsys.readouterr().err
    assert wanted in said if wanted else "nothing to do" not in said


def test_the_command_line_speaks_in_flags(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(uncaught, "spell", in_flags)

    def train(*flags):
        with pytest.raises(SystemExit) as ended:
            main(["train", "--out", str(tmp_path), "--checkpoint-every", "4", "--epochs", "1", *flags])
        return ended.value.code, capsys.readouterr().err

    assert train("--max-steps", "12")[0] == 0
    code, said = train()
    assert code == 2 and "continue it with `--resume`, replace it with `--overwrite`" in said
    code, said = train("--resume")
    assert code == 0 and "expected a larger `--max-steps`, or `--max-steps 0` for no limit" in said
    damage(complete(tmp_path / "checkpoints")[-1])
    code, said = train("--resume")
    assert code == 1 and "step-00000008 with `--resume-step 8`" in said
    code, said = train("--resume-step", "8")
    assert code == 0 and f"going on from {tmp_path}/checkpoints/step-00000008" in said


@pytest.mark.parametrize("strategy", ["local-sgd:period=3", "gossip", "gossip:graph=complete,bits=4", "gossip:pace=own",
                                      "elastic", "hierarchical", "asgd:communication=two-sided", "delayed"])
def test_a_run_that_is_over_keeps_its_bits_when_it_is_resumed(tmp_path, strategy):
    job = {"strategy": strategy, "out": tmp_path, "epochs": 1, "quiet": True, "optimiser": "momentum"}
    nodes = [0, 0, 1]

    def run(comm):
        return mpiddl.train("softmax", "digits", comm=comm, resume=True, **job)

    first = virtual.run(3, run, nodes)[0]
    for size in (3, 2):
        again = virtual.run(size, run, nodes[:size])[0]
        for name, array in first.params.items():
            assert (again.params[name] == array).all()


TAKE_OVER = ["allreduce", "local-sgd:period=2", "gossip", "hierarchical", "two-step", "gossip:pace=own",
             "asgd:communication=two-sided", "ssp", "staleness-aware:communication=two-sided",
             "dc-asgd-a:communication=two-sided", "dana:communication=two-sided", "ddc-asgd:communication=two-sided",
             "ddc-asgd-literal:communication=two-sided"]


@pytest.mark.parametrize("optimiser", only({"adam"}, ["momentum", "nesterov", "adam"]))
@pytest.mark.parametrize("before", TAKE_OVER)
def test_moments_go_on_with_any_other_strategy(tmp_path, before, optimiser):
    """With one worker each strategy takes the steps of one rank, bit for bit, also when it takes over from another one."""
    job = {"epochs": 2, "optimiser": optimiser, "rate": 0.01, "quiet": True, "validation": 0.0, "batch": 256}

    def run(strategy, out, steps, resume):
        def program(comm):
            settings = {**job, "out": tmp_path / out, "max_steps": steps, "resume": resume}
            return mpiddl.train("softmax", "digits", comm=comm, strategy=strategy, **settings)

        result = virtual.run(1 + isinstance(make_strategy(strategy), ParameterServer), program)[0]
        return np.concatenate([array.ravel() for array in result.params.values()])

    def fits(strategy):
        return optimiser in (make_strategy(strategy).optimisers or (optimiser,))

    if fits(before):
        run(before, "first", 5, False)
        wanted = run("allreduce", "whole", 10, False)
        for after in filter(fits, TAKE_OVER):
            shutil.copytree(tmp_path / "first", tmp_path / after)
            assert (run(after, after, 10, True) == wanted).all(), after


@pytest.mark.parametrize("rule, seen", [("asgd", 20), ("dana", 5)])
def test_moments_of_four_workers_have_seen_all_updates_that_were_made_with_them(tmp_path, rule, seen):
    job = {"strategy": f"{rule}:communication=two-sided,servers=2", "simulate": 6, "optimiser": "nesterov", "max_steps": 5}
    mpiddl.train("softmax", "digits", out=tmp_path, quiet=True, **job)
    found = load(tmp_path)
    assert found.manifest["seen"] == seen and all(moment.any() for moment in found.optimiser.values())
    mpiddl.train("softmax", "digits", out=tmp_path, quiet=True, resume=True, **job | {"strategy": "allreduce", "max_steps": 7})
    assert load(tmp_path).manifest["seen"] == seen + 2  # and not 7


def test_another_strategy_begins_with_the_one_model_on_all_ranks(tmp_path):
    """The checkpoint is from the middle of a period of local SGD, when each rank has a model of its own."""

    def run(strategy, steps, resume):
        def program(comm):
            return mpiddl.train("softmax", "digits", comm=comm, strategy=strategy, out=tmp_path, quiet=True, max_steps=steps,
                                resume=resume, optimiser="sgd", rate=1e-3).params

        return virtual.run(3, program)

    run("local-sgd:period=30", 20, False)
    before = load(tmp_path).model
    own = [load(tmp_path, rank, 3).own["params"] for rank in range(3)]
    ends = run("allreduce", 21, True)
    model, *after = (np.concatenate([params[name].ravel() for name in ends[0]]) for params in (before, *ends))
    assert all((end == after[0]).all() for end in after)
    assert 0 < np.linalg.norm(after[0] - model) < min(np.linalg.norm(params - model) for params in own)  # one step, not 20
