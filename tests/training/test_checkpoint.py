"""Checkpoints: round trips, damage, foreign files, full disks, and that an earlier one is never touched."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from mpiddl.errors import CheckpointError
from mpiddl.strategies import Pending
from mpiddl.training import checkpoint
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

STATE = {"queue": [np.arange(3.0), np.float32(2)], "round": 3, "name": "x", "none": None, "yes": True, "deep": [{"a": []}]}


def write(folder, step=1, keep=3, value=1.0, size=2, meta=None):
    def program(comm):
        model = {"weight1": np.full((2, 3), value, np.float32), "bias1": np.zeros(3, np.float32)}
        state = {"mine": np.full(2, float(comm.rank)), "flight": Pending(np.arange(2.0))}
        return checkpoint.save(comm, folder, step, model, {"velocity": np.ones(9, np.float32)}, {"own": np.array([comm.rank])},
                               state, meta or {"index": step}, keep)

    return virtual.run(size, program)[0]


def test_what_is_saved_is_loaded(tmp_path):
    manifest = write(tmp_path)
    for rank in range(2):
        found = checkpoint.load(tmp_path, rank, 2)
        assert found.manifest == manifest
        assert found.model["weight1"].tolist() == np.ones((2, 3)).tolist()
        assert found.optimiser["velocity"].dtype == np.float32
        assert found.own["own"].tolist() == [rank]
        assert found.state["mine"].tolist() == [rank, rank]
        assert found.state["flight"].wait().tolist() == [0.0, 1.0]
        found.state["mine"] += 1  # what is loaded can be trained on


def test_an_end_between_two_renames_loses_no_checkpoint(tmp_path, monkeypatch):
    """The older checkpoint of the same step has stepped back, and the new one is not in its place yet."""
    write(tmp_path, value=1.0)
    really = Path.rename

    def rename(path, target):
        if path.name.startswith(".writing-"):
            raise OSError(errno.EIO, "the disk is gone")
        return really(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        write(tmp_path, value=2.0)
    monkeypatch.undo()
    assert (checkpoint.load(tmp_path).model["weight1"] == 1).all()
    write(tmp_path, step=2, value=2.0)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step-00000001", "step-00000002"]
    assert len(list(tmp_path.iterdir())) == 2


def test_another_number_of_ranks_gets_the_model_alone(tmp_path):
    write(tmp_path)
    found = checkpoint.load(tmp_path, 0, 3)
    assert found.own is None and found.state is None
    assert set(found.model) == {"weight1", "bias1"}


def test_any_state_comes_back():
    structure, arrays = checkpoint.pack(STATE)
    back = checkpoint.unpack(json.loads(json.dumps(structure)), arrays)
    assert back["queue"][0].tolist() == [0, 1, 2] and back["queue"][1] == 2
    assert {key: back[key] for key in ("round", "name", "none", "yes", "deep")} == {
        key: STATE[key] for key in ("round", "name", "none", "yes", "deep")
    }


def test_a_state_that_cannot_be_saved_is_named():
    with pytest.raises(CheckpointError, match="got a value of type function"):
        checkpoint.pack({"f": [lambda: None]})


def test_the_newest_are_kept(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step, keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    assert checkpoint.load(tmp_path).manifest["step"] == 5


def test_one_of_the_same_step_is_replaced(tmp_path):
    write(tmp_path, value=1.0)
    write(tmp_path, value=2.0)
    assert checkpoint.load(tmp_path).model["weight1"][0, 0] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_an_unfinished_one_is_never_read(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    assert checkpoint.load(tmp_path).manifest["step"] == 1


@pytest.mark.parametrize("name", ["model.safetensors", "optimiser.safetensors", "rank-00000.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_found(tmp_path, name, damage):
    write(tmp_path)
    path = tmp_path / "step-00000001" / name
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        content[-1] ^= 1
        path.write_bytes(content if damage == "flip" else content[:-3])
    with pytest.raises(CheckpointError, match=name):
        checkpoint.load(tmp_path, 0, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "damaged"), ("[]", "not a checkpoint manifest"), ('{"format": "other"}', "not a checkpoint manifest of mpiddl"),
     ('{"format": "mpiddl-checkpoint", "version": 99}', "version 99"),
     ('{"format": "mpiddl-checkpoint", "version": 1, "step": 1}', "damaged"),
     ("[" * 100_000, "damaged")],
)
def test_a_foreign_manifest_is_named(tmp_path, content, message):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(tmp_path)


def test_a_changed_manifest_is_found(tmp_path):
    write(tmp_path)
    path = tmp_path / "step-00000001" / "manifest.json"
    path.write_text(path.read_text().replace('"index": 1', '"index": 7'))
    with pytest.raises(CheckpointError, match="its checksum is wrong"):
        checkpoint.load(tmp_path)


def test_no_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="got no checkpoint"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("when", ["model", "own", "manifest"])
def test_a_full_disk_leaves_the_earlier_ones_alone(tmp_path, monkeypatch, victim, when):
    """The disk fills up in the middle of a file; a real full disk is in test_cli_bad_input.py."""
    write(tmp_path, 1, value=1.0)
    before = {path: path.read_bytes() for path in (tmp_path / "step-00000001").iterdir()}
    part = {"model": "model", "own": f"rank-{victim:05d}", "manifest": "manifest"}[when]
    real = checkpoint._write_bytes

    def full(path, content):
        if path.name.startswith(part):
            real(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, content)

    monkeypatch.setattr(checkpoint, "_write_bytes", full)
    with pytest.raises(CheckpointError, match=r"No space left on device .*MiB free.*earlier checkpoints are untouched"):
        write(tmp_path, 2, value=2.0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
    assert {path: path.read_bytes() for path in before} == before
    assert checkpoint.load(tmp_path).model["weight1"][0, 0] == 1


def test_another_model_does_not_fit(tmp_path):
    from mpiddl.memory import FlatBuffer

    write(tmp_path)
    found = checkpoint.load(tmp_path)
    for shapes, dtype, message in [
        ({"weight1": (3, 2), "bias1": (3,)}, "float32", r"weight1: got float32 of shape \(2, 3\)"),
        ({"weight1": (2, 3), "bias1": (3,)}, "float64", "expected float64"),
        ({"weight1": (2, 3), "bias2": (3,)}, "float32", "bias2: got nothing"),
        ({"weight1": (2, 3)}, "float32", r"array bias1 \(float32 of shape \(3,\)\), expected only the parameters of"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            checkpoint.fill_params(FlatBuffer(shapes, dtype), found)
