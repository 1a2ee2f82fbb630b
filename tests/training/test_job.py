"""Settings: defaults, bounds, files; every mistake is one message that names the setting, what came and what was wanted."""

from __future__ import annotations

import numpy as np
import pytest

import mpiddl
from mpiddl.cli import main
from mpiddl.errors import UsageError
from mpiddl.optim import Adam
from mpiddl.training.job import FIELDS, Job, make_job, read_job_file
from mpiddl.training.run_folder import Folder

pytestmark = pytest.mark.no_mpi

WRONG = [
    ({"epochs": -1}, "epochs: got -1, expected 0 or more"),
    ({"epochs": 2.5}, "epochs: got 2.5, expected a whole number"),
    ({"epochs": True}, "epochs: got True, expected a whole number"),
    ({"batch": 0}, "batch: got 0, expected 1 or more"),
    ({"rate": float("nan")}, "rate: got nan"),
    ({"rate": float("inf")}, "rate: got inf"),
    ({"rate": "fast"}, "rate: got 'fast', expected a number"),
    ({"hidden": (64, 0)}, "hidden: got 0, expected 1 or more"),
    ({"hidden": "64"}, "hidden: got '64', expected a list of whole numbers"),
    ({"model": "mpl"}, "did you mean 'mlp'?"),
    ({"dtype": "float16"}, "expected one of float32, float64"),
    ({"validation": 1.0}, "validation: got 1, expected 0 or more, at most 0.9"),
    ({"reproducible": "yes"}, "reproducible: got 'yes', expected true or false"),
    ({"reproducible": True, "threads": 2}, "threads: got 2, expected 1 (or 0) with `reproducible`"),
    ({"epoch": 3}, "did you mean 'epochs'?"),
    ({"zzz": 3}, "unknown setting 'zzz'; known: data,"),
    ({"target_accuracy": 0.9, "validation": 0.0}, "target_accuracy"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=str)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(UsageError) as caught:
        make_job(settings)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_setting_has_a_meaning_and_a_default_that_it_accepts():
    for field in FIELDS.values():
        assert len(field.metadata["text"]) > 10
        make_job({field.name: field.default})


def test_numbers_of_numpy_are_numbers():
    job = Job(epochs=np.int64(3), rate=np.float32(0.5), hidden=[np.int32(4)])
    assert (job.epochs, job.rate, job.hidden) == (3, 0.5, (4,))
    assert Job(reproducible=np.True_).reproducible is True


def test_a_job_file_is_read_as_it_was_written(tmp_path):
    job = Job(hidden=(256, 128), rate=0.1, reproducible=True, data='we"ird\\näme', strategy="local-sgd:period=3")
    folder = Folder(tmp_path / "run")
    folder.prepare(resume=False, overwrite=False)
    folder.write_job(job.as_dict())
    assert make_job(read_job_file(folder.job)) == job


def test_a_job_file_may_have_a_section(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[train]\nepochs = 3\n")
    assert make_job(read_job_file(path)).epochs == 3


@pytest.mark.parametrize("content", [b"epochs = ", b"\xff\xfe", None], ids=["cut", "binary", "missing"])
def test_a_broken_job_file_is_named(tmp_path, content):
    path = tmp_path / "job.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"job\.toml"):
        read_job_file(path)


def test_the_rate_follows_the_batch_if_asked():
    assert Job(rate=0.1, batch=256, scale_rate=64).learning_rate() == pytest.approx(0.4)
    assert Job(optimiser="adam").learning_rate() == 0.001


@pytest.mark.parametrize(("alias", "name", "value"), [
    ("lr", "rate", 0.3), ("learning_rate", "rate", 0.3), ("optimizer", "optimiser", "adam"), ("batch_size", "batch", 9),
])  # fmt: skip
def test_other_names_are_understood(tmp_path, alias, name, value):
    assert getattr(make_job({alias: value}), name) == value
    (tmp_path / "job.toml").write_text(f"[train]\n{alias} = {value!r}\n")
    assert read_job_file(tmp_path / "job.toml") == {name: value}
    with pytest.raises(UsageError, match=f"{alias}, {name}: got two names of the same setting, expected only {name}"):
        make_job({alias: value, name: value})


def test_other_names_on_the_command_line_win_over_those_of_a_file(tmp_path, capsys):
    (tmp_path / "job.toml").write_text('learning_rate = 0.3\noptimizer = "sgd"\nbatch_size = 32\n')
    with pytest.raises(SystemExit, match="0"):
        main(["train", str(tmp_path / "job.toml"), "--lr", "0.4", "--optimizer", "adam", "--batch", "16", "--dry-run"])
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert all(line in told for line in (["rate", "0.4"], ["optimiser", "adam"], ["batch", "16"]))
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--lr", "0.4", "--rate", "0.4"])
    assert "got two names of the same setting" in capsys.readouterr().err


def test_other_names_in_python():
    job = {"epochs": 1, "quiet": True}
    named, usual = (mpiddl.train("softmax", "digits", **job, **more) for more in
                    ({"lr": 0.01, "optimizer": "adam", "batch_size": 32}, {"rate": 0.01, "optimiser": "adam", "batch": 32}))
    objects = mpiddl.train("softmax", "digits", lr=0.01, optimizer=Adam(), batch=32, **job)
    for result in (named, objects):
        assert result.params["weight1"].tobytes() == usual.params["weight1"].tobytes()
    with pytest.raises(UsageError, match="optimiser, optimizer: got two names"):
        mpiddl.train("softmax", "digits", optimiser="adam", optimizer=Adam(), **job)


OWN = [("ddc-asgd", "nesterov"), ("dana", "nesterov"), ("dc-asgd-momentum", "momentum"), ("asgd", "momentum"),
       ("allreduce", "momentum")]


@pytest.mark.parametrize(("strategy", "optimiser"), OWN)
def test_an_optimiser_that_was_not_chosen_is_that_of_the_strategy(tmp_path, capsys, strategy, optimiser):
    """In a run, from its job.toml, when it goes on, and told beforehand."""
    job = {"strategy": strategy, "simulate": 3, "epochs": 1, "rate": 0.01, "quiet": True}
    mpiddl.train("softmax", "digits", out=tmp_path / "run", **job)
    kept = read_job_file(tmp_path / "run" / "job.toml")
    assert kept["optimiser"] == optimiser
    chosen = mpiddl.train("softmax", "digits", optimiser=optimiser, **job)
    again = mpiddl.train(**{**kept, "quiet": True})
    assert chosen.params["weight1"].tobytes() == again.params["weight1"].tobytes()
    for more in ({}, {"optimiser": "auto"}, {"optimiser": optimiser}):
        mpiddl.train("softmax", "digits", out=tmp_path / "run", resume=True, **{**job, "epochs": 2}, **more)
        assert read_job_file(tmp_path / "run" / "job.toml")["optimiser"] == optimiser
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--strategy", strategy, "--simulate", "3", "--dry-run"])
    assert f"optimiser        {optimiser}\n" in capsys.readouterr().out


def test_an_optimiser_that_was_chosen_stays(tmp_path):
    job = {"quiet": True, "epochs": 1, "simulate": 3}
    with pytest.raises(UsageError, match="optimiser: got momentum, expected nesterov for strategy ddc-asgd"):
        mpiddl.train("softmax", "digits", strategy="ddc-asgd", optimiser="momentum", **job)
    (tmp_path / "job.toml").write_text('optimiser = "momentum"\n')  # as job.toml of an earlier version says it
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(tmp_path / "job.toml"), "--strategy", "ddc-asgd", "--simulate", "3"])
    mpiddl.train("softmax", "digits", out=tmp_path / "run", strategy="asgd", optimiser="momentum", **job)
    with pytest.raises(UsageError, match="optimiser: got momentum"):  # a run that goes on keeps what it had
        mpiddl.train("softmax", "digits", out=tmp_path / "run", strategy="ddc-asgd", resume=True, **{**job, "epochs": 2})
