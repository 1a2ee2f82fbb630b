"""Rows on another scale than the training rows: one warning that says what came and what to pass; none where all is well."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import mpiddl
from mpiddl import kernels
from mpiddl.data import row_scale
from mpiddl.errors import DataError
from mpiddl.training import checkpoint, prediction, session
from mpiddl.training.inference import evaluate_run, predict_run

pytestmark = pytest.mark.no_mpi

RANDOM = np.random.default_rng(0)
BYTES = RANDOM.integers(0, 256, (60, 12), dtype=np.uint8)
LABELS = RANDOM.integers(0, 3, 60)
ROWS = {"bytes": BYTES, "floats of bytes": BYTES.astype(float), "0 to 1": BYTES / 255,
        "gaussian": RANDOM.standard_normal((60, 12)), "none": BYTES[:0]}  # fmt: skip
UNSCALED, SCALED = "expected uint8 rows or numbers from 0 to 1", "got uint8 rows, which are scaled by 1/255"
CASES = [
    ("bytes", "bytes", ""), ("bytes", "floats of bytes", UNSCALED), ("bytes", "0 to 1", ""), ("bytes", "none", ""),
    ("0 to 1", "floats of bytes", "to 255, expected the scale of the training rows"),
    ("0 to 1", "bytes", ""), ("floats of bytes", "bytes", SCALED), ("floats of bytes", "floats of bytes", ""),
    ("gaussian", "floats of bytes", ""), ("gaussian", "bytes", ""),
]  # fmt: skip


def said_of(model, x):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.predict(x)
    assert all(each.category is UserWarning and each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(("trained_on", "given", "words"), CASES)
def test_what_predict_warns_of(tmp_path, trained_on, given, words):
    result = mpiddl.train("softmax", (ROWS[trained_on], LABELS), epochs=1, batch=10, quiet=True, out=tmp_path / "run")
    for model in (result, prediction.load(tmp_path / "run")):
        said = said_of(model, ROWS[given])
        assert len(said) == bool(words) and words in "".join(said)


@pytest.mark.parametrize("call", ["predict", "outputs"])
def test_what_is_no_array_is_one_message(tmp_path, call):
    result = mpiddl.train("softmax", (BYTES, LABELS), epochs=1, batch=10, quiet=True, out=tmp_path)
    for model in (result, prediction.load(tmp_path)):
        with pytest.raises(DataError, match="x: got list, expected an array"):
            getattr(model, call)([[1, 2], [3]])


@pytest.mark.mpi
def test_all_ranks_know_the_scale(comm):
    result = mpiddl.train("softmax", (ROWS["0 to 1"], LABELS), comm=comm, epochs=1, batch=10, quiet=True)
    assert result.summary["data"]["bytes"] is False and 0.9 < result.summary["data"]["largest"] <= 1
    assert len(set(comm.allgather(result.summary["data"]["largest"]))) == 1


def test_the_scale_is_that_of_all_rows_and_is_found_without_a_kernel(monkeypatch):
    """Kernels are compiled by one rank of each node first, in `warm`."""
    x, called = np.where(np.arange(60)[:, None] == 59, 5.0, np.zeros((60, 12))), []
    for module, name in ((kernels, "gather_rows"), (session, "warm")):
        there = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, there=there, name=name: (called.append(name), there(*given))[1])
    result = mpiddl.train("softmax", (x, LABELS), epochs=1, batch=4, test_fraction=0, quiet=True)
    assert result.summary["data"]["largest"] == 5 and called[0] == "warm" and "gather_rows" in called


def test_nothing_is_said_of_a_model_whose_manifest_does_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr("mpiddl.training.session._scale", lambda control, rows: {})
    mpiddl.train("softmax", (BYTES, LABELS), epochs=1, batch=10, quiet=True, out=tmp_path)
    assert "largest" not in checkpoint.load_manifest(checkpoint.find(tmp_path))["data"]
    assert said_of(prediction.load(tmp_path), ROWS["floats of bytes"]) == []


@pytest.mark.parametrize(("trained_on", "given", "words"), [case for case in CASES if case[1] in ("bytes", "floats of bytes")])
def test_the_commands_print_it_once(tmp_path, capsys, trained_on, given, words):
    run, folder = tmp_path / "run", tmp_path / "data"
    folder.mkdir()
    np.save(folder / "x.npy", ROWS[given])
    np.save(folder / "y.npy", LABELS)
    mpiddl.train("softmax", (ROWS[trained_on], LABELS), epochs=1, batch=10, quiet=True, out=run)
    capsys.readouterr()
    predict_run(run, str(folder / "x.npy"), tmp_path / "out.npy")
    told = capsys.readouterr().err
    evaluate_run(run, str(folder))
    for text in (told, capsys.readouterr().err):
        assert text.count("x: got") == bool(words) and words in text


def test_magnitudes():
    for x, expected in ((np.array([-3.0, 2.0]), 3.0), (np.array([-128], np.int8), 128.0), (np.array([]), 0.0),
                        (np.array(["a"]), 0.0)):  # fmt: skip
        assert row_scale.magnitude(x) == expected
