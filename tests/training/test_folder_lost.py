"""What a run does when its folder is removed or damaged by others: it says so, keeps what it can, and does not end with 0."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from harness.tiers import only

import mpiddl
from mpiddl.data import arrays_data
from mpiddl.errors import OutputError, UsageError
from mpiddl.training import run as training
from mpiddl.training.metrics import read_lines
from mpiddl.training.run_folder import Folder
from mpiddl.training.watch import Watch
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

JOB = {"epochs": 3, "batch": 50, "log_every": 5}


def meddle(monkeypatch, action, step, rank=0):
    """Have ``action`` done once, by another process as it were, before ``step`` of the run is measured."""
    real, done = Watch.__call__, []

    def call(self, state, *args, **options):
        if self.comm.rank == rank and state.index >= step and not done:
            done.append(action())
        return real(self, state, *args, **options)

    monkeypatch.setattr(Watch, "__call__", call)


@pytest.mark.mpi
@pytest.mark.parametrize("strategy", ["allreduce", "gossip:pace=own"])
def test_a_removed_folder_is_made_again_and_told(comm, mpi_tmp_path, monkeypatch, capsys, strategy):
    out = mpi_tmp_path / "run"
    meddle(monkeypatch, lambda: shutil.rmtree(out), 12)
    with pytest.raises(OutputError, match="files were removed while the run went on"):
        mpiddl.train("mlp", "digits", comm=comm, out=out, strategy=strategy, **JOB)
    printed = capsys.readouterr()
    comm.Barrier()
    assert {"job.toml", "metrics.jsonl", "summary.json", "checkpoints", ".lock"} <= {entry.name for entry in out.iterdir()}
    steps = [line["step"] for line in read_lines(out / "metrics.jsonl")[0]]
    assert min(steps) <= 5
    assert strategy != "allreduce" or max(steps) == json.loads((out / "summary.json").read_text())["steps"]
    if comm.rank == 0:
        assert printed.err.count("files were removed") == 1 and "test accuracy" in printed.out
    comm.Barrier()
    mpiddl.train("mlp", "digits", comm=comm, out=out, strategy=strategy, resume=True, quiet=True, **{**JOB, "epochs": 4})


@pytest.mark.mpi
@pytest.mark.parametrize("strategy", ["allreduce", "gossip:pace=own"])
def test_a_folder_that_is_removed_after_the_last_checkpoint(comm, mpi_tmp_path, monkeypatch, strategy):
    out, real = mpi_tmp_path / "run", Watch.look_back

    def look_back(self, state):
        self.comm.Barrier()
        if self.comm.rank == 0:
            shutil.rmtree(out)
        self.comm.Barrier()
        real(self, state)

    monkeypatch.setattr(Watch, "look_back", look_back)
    with pytest.raises(OutputError, match=r"checkpoints that were removed are lost$"):
        mpiddl.train("mlp", "digits", comm=comm, out=out, quiet=True, strategy=strategy, **JOB)
    comm.Barrier()
    assert {"job.toml", "metrics.jsonl", "summary.json", ".lock"} <= {entry.name for entry in out.iterdir()}
    comm.Barrier()


@pytest.mark.mpi
def test_all_ranks_raise_if_the_summary_cannot_be_written(comm, mpi_tmp_path, monkeypatch):
    out, real = mpi_tmp_path / "run", training._summary

    def remove(*args):
        if comm.rank == 0:
            shutil.rmtree(out)
        return real(*args)

    monkeypatch.setattr(training, "_summary", remove)
    with pytest.raises(OutputError, match=r"summary\.json: cannot be written: No such file"):
        mpiddl.train("mlp", "digits", comm=comm, out=out, quiet=True, **JOB)


@pytest.mark.parametrize("refused", [".", ".lock", "metrics.jsonl"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE])
def test_a_folder_that_cannot_be_looked_at(tmp_path, monkeypatch, refused, number):
    real, refuses = os.stat, []

    def stat(path, *args, **options):
        if refuses and Path(path) == tmp_path / refused:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", stat)
    meddle(monkeypatch, lambda: refuses.append(True), 12)
    with pytest.raises(OutputError, match=f"out: {tmp_path}.*: {os.strerror(number)}"):
        mpiddl.train("mlp", "digits", out=tmp_path, quiet=True, **JOB)


@pytest.mark.parametrize("name", ["job.toml", "metrics.jsonl", ".lock"])
def test_a_file_alone(tmp_path, monkeypatch, name):
    meddle(monkeypatch, (tmp_path / name).unlink, 12)
    with pytest.raises(OutputError, match="files were removed"):
        mpiddl.train("mlp", "digits", out=tmp_path, quiet=True, **JOB)
    assert (tmp_path / name).exists() and read_lines(tmp_path / "metrics.jsonl")[0][0]["step"] == 5


def test_another_folder_in_its_place_is_left_alone(tmp_path, monkeypatch):
    out = tmp_path / "run"

    def replace():
        out.rename(tmp_path / "moved")
        out.mkdir()
        (out / "job.toml").write_text("another run's")

    meddle(monkeypatch, replace, 12)
    with pytest.raises(OutputError, match="the folder was replaced by another one"):
        mpiddl.train("mlp", "digits", out=out, quiet=True, **JOB)
    assert [entry.name for entry in out.iterdir()] == ["job.toml"] and (out / "job.toml").read_text() == "another run's"


def test_a_folder_that_another_run_has_taken(tmp_path, monkeypatch):
    other = Folder(tmp_path)

    def take():
        (tmp_path / ".lock").unlink()
        other.prepare(resume=True, overwrite=False)

    meddle(monkeypatch, take, 12)
    try:
        with pytest.raises(UsageError, match="another run is writing to it"):
            mpiddl.train("mlp", "digits", out=tmp_path, quiet=True, **JOB)
    finally:
        other.release()


DAMAGE = {
    "a key that is missing": '{"step": 5, "loss": 1.0, "accuracy": 0.5, "bytes": 0}',
    "a word for a number": '{"step": 5, "loss": "low", "accuracy": 0.5, "elapsed": 1.0, "bytes": 0}',
    "a step that is a word": '{"step": "five", "loss": 1.0, "accuracy": 0.5, "elapsed": 1.0, "bytes": 0}',
    "not a number": '{"step": 5, "loss": NaN, "accuracy": 0.5, "elapsed": 1.0, "bytes": 0}',
    "no JSON": '{"step": 5, "loss',
    "nested too deeply": "[" * 100_000,
    "a list": "[5]",
    "a validation without accuracy": '{"step": 5, "validation_loss": 1.0, "elapsed": 1.0, "bytes": 0}',
}


@pytest.mark.plots
@pytest.mark.parametrize("how", only({"no JSON"}, DAMAGE))
def test_a_damaged_line_is_told_when_the_run_is_resumed(tmp_path, capsys, how):
    mpiddl.train("mlp", "digits", out=tmp_path, quiet=True, **JOB)
    line, file = DAMAGE[how], tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n")
    mpiddl.train("mlp", "digits", out=tmp_path, resume=True, **{**JOB, "epochs": 4})
    assert capsys.readouterr().err.count(f"{file}: line 4 is damaged, expected a line of metrics") == 1
    assert file.read_text().splitlines()[: len(lines)] == lines  # none but the damaged line is left out


def test_a_line_that_a_killed_run_left_without_its_end_is_no_damage(tmp_path):
    whole = '{"step": 5, "loss": null, "accuracy": null, "elapsed": 1.0, "bytes": 0}\n'
    (tmp_path / "metrics.jsonl").write_text(whole + whole[:20])
    assert [len(part) for part in read_lines(tmp_path / "metrics.jsonl")] == [1, 0]


def test_simulated_ranks_notice_it_too(tmp_path, monkeypatch):
    x = [[float(number % 7), 1.0] for number in range(60)]
    data = arrays_data(x, [number % 2 for number in range(60)])
    meddle(monkeypatch, lambda: shutil.rmtree(tmp_path / "run"), 2)

    def program(comm):
        with pytest.raises(OutputError, match="files were removed"):
            mpiddl.train("softmax", data, comm=comm, out=tmp_path / "run", epochs=2, batch=10, quiet=True)

    virtual.run(2, program)
