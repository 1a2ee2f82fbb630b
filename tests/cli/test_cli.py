"""The commands, as a person starts them: alone and under the launcher, from flags and from a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from harness import jobs

import mpiddl
from mpiddl.cli import main
from mpiddl.data import open_data
from mpiddl.training.inference import evaluate_run, predict_run
from mpiddl.transport import virtual

TRAIN = ("mpiddl", "train", "--data", "digits", "--epochs", "2")


def test_train_evaluate_predict_on_several_ranks(mpirun, tmp_path):
    run = tmp_path / "run"
    trained = mpirun(4, *TRAIN, "--out", run, "--hidden", "32,16")
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.count("test accuracy") == 1
    assert "allreduce on 4 ranks" in trained.stdout
    assert "\x1b" not in trained.stdout
    summary = json.loads((run / "summary.json").read_text())

    evaluated = mpirun(2, "mpiddl", "evaluate", run, "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    found = json.loads(evaluated.stdout)
    assert found["accuracy"] == summary["test_accuracy"] and found["rows"] == 360

    with pytest.raises(SystemExit, match="0"):
        main(["predict", str(run), "digits", "-o", str(tmp_path / "classes.npy")])
    _, y = open_data("digits").test.read([range(360)])[0]
    assert np.mean(np.load(tmp_path / "classes.npy") == y) == pytest.approx(summary["test_accuracy"])


@pytest.mark.parametrize("size", [1, 3, 40])
def test_predictions_do_not_depend_on_the_ranks(tmp_path, size):
    trained = mpiddl.train("mlp", "digits", epochs=1, out=tmp_path / "run", quiet=True)
    x, _ = open_data("digits").test.read([range(360)])[0]
    np.save(tmp_path / "rows.npy", x.reshape(360, 8, 8))
    virtual.run(size, lambda comm: predict_run(tmp_path / "run", str(tmp_path / "rows.npy"), tmp_path / "raw.npy", True, comm))
    np.testing.assert_allclose(np.load(tmp_path / "raw.npy"), trained.predict(x), rtol=1e-4, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw.npy", "rows.npy", "run"]
    counted = virtual.run(size, lambda comm: evaluate_run(tmp_path / "run", comm=comm))[0]
    assert counted["accuracy"] == trained.summary["test_accuracy"]


@pytest.mark.more
def test_a_job_file_and_flags_that_win(command, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text('data = "digits"\nepochs = 7\nhidden = [8]\n')
    done = command("mpiddl", "train", job, "--epochs", "1", "--out", tmp_path / "run", "--quiet")
    assert done.returncode == 0 and done.stdout == done.stderr == ""
    resolved = (tmp_path / "run" / "job.toml").read_text()
    assert "epochs = 1\n" in resolved and "hidden = [8]\n" in resolved
    again = command("mpiddl", "train", tmp_path / "run" / "job.toml", "--out", tmp_path / "again", "--quiet")
    assert again.returncode == 0
    digest = [json.loads((tmp_path / name / "summary.json").read_text())["checkpoint_sha256"] for name in ("run", "again")]
    assert digest[0] == digest[1]


def test_a_dry_run_tells_and_writes_nothing(mpirun, tmp_path):
    done = mpirun(2, *TRAIN, "--out", tmp_path / "run", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "rank 1           shards 8,9,10,11,12,13,14,15; " in done.stdout
    assert not (tmp_path / "run").exists()


def test_help_is_told_once(mpirun):
    done = mpirun(3, "mpiddl", "train", "--help")
    assert done.returncode == 0 and done.stdout.count("Usage:") == 1


def test_the_module_is_the_command(command):
    assert command(sys.executable, "-m", "mpiddl", "--version").stdout.startswith("mpiddl ")


# `mpiddl`, whose ranks go on no further once they have written the checkpoint of step 100.
STOPPING = """
import signal
from mpiddl import cli
from mpiddl.training import checkpoint

def save(comm, folder, step, *words):
    save_it(comm, folder, step, *words)
    while step == 100:
        signal.pause()

save_it, checkpoint.save = checkpoint.save, save
cli.main()
"""


@pytest.mark.more
def test_killed_and_resumed_has_the_bits_of_a_run_that_was_not(tmp_path, command):
    args = ["--data", "digits", "--epochs", "100", "--checkpoint-every", "50", "--seed", "3"]
    env = jobs.environment(sys.executable)

    def start(out, *more, program=("mpiddl",)):
        words = jobs.mpi_command(2, [*program, "train", *args, "--out", str(out), *more], env)
        return jobs.started(words, env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    with start(tmp_path / "cut", program=(sys.executable, "-c", STOPPING)) as process:
        while not (tmp_path / "cut" / "checkpoints" / "step-00000100").exists() and process.poll() is None:
            time.sleep(0.01)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
    assert not (tmp_path / "cut" / "summary.json").exists()
    for folder, more in ((tmp_path / "cut", ["--resume"]), (tmp_path / "whole", [])):
        with start(folder, *more) as process:
            assert process.wait() == 0
    digest = [json.loads((tmp_path / name / "summary.json").read_text())["checkpoint_sha256"] for name in ("cut", "whole")]
    assert digest[0] == digest[1]


@pytest.mark.no_mpi
def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch, capfd):
    from mpiddl import cli

    def interrupted(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.mpiddl, "main", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 130 and capfd.readouterr().err == "\nmpiddl: stopped by Ctrl-C\n"
