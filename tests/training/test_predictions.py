"""What `predict` gives back: labels as they came, and targets in the shape that they had."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from harness.jobs import Finished, expect

import mpiddl
from mpiddl.cli import main
from mpiddl.data import arrays_data
from mpiddl.errors import CheckpointError, DataError, MismatchError
from mpiddl.training import checkpoint
from mpiddl.training.inference import evaluate_run, predict_run
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

NAMES = np.array(["pear", "apple", "fig"])
CENTRES = np.array([[4.0, 0.0], [-4.0, 0.0], [0.0, 6.0]])
QUICK = {"hidden": (8,), "epochs": 6, "batch": 32, "quiet": True}
SLOW = {**QUICK, "rate": 0.005}


def fruit(rows=240):
    """Points around a centre for each name: a network finds every one."""
    number = np.arange(rows) % 3
    return CENTRES[number] + 0.1 * np.random.default_rng(0).standard_normal((rows, 2)), NAMES[number]


X, Y = fruit()
FORMS = {
    "numpy": Y, "list": Y.tolist(), "objects": Y.astype(object), "bytes": Y.astype("S"), "a column": Y[:, None],
    "numpy's new strings": Y.astype(np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else Y,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_strings_are_accepted_and_come_back(form):
    result = virtual.run(3, lambda comm: mpiddl.train("mlp", (X, FORMS[form]), comm=comm, **QUICK))[0]
    assert result.summary["test_accuracy"] == 1.0
    assert result.summary["data"]["class_names"] == ("apple", "fig", "pear")  # sorted, as scikit-learn does
    assert np.array_equal(result.predict(X), Y)
    assert np.array_equal(result.outputs(X).argmax(axis=1), np.unique(Y, return_inverse=True)[1])


def test_a_folder_of_data_may_be_a_path(tmp_path):
    folder = saved(tmp_path, x=X, y=Y)
    one, other = (mpiddl.train("softmax", data, **QUICK) for data in (Path(folder), str(folder)))
    assert all(np.array_equal(one.params[name], other.params[name]) for name in one.params)


def test_numbers_come_back_as_outputs():
    numbers = np.unique(Y, return_inverse=True)[1]
    result = mpiddl.train("mlp", (X, numbers), **QUICK)
    assert result.predict(X).shape == (240, 3) and np.array_equal(result.predict(X).argmax(axis=1), numbers)
    assert np.array_equal(result.predict(X), result.outputs(X))
    for call in (result.predict, result.outputs):
        with pytest.raises(DataError, match="x: got a masked array"):
            call(np.ma.masked_less(X, 0))


def saved(folder, **arrays):
    np.savez(folder / "data.npz", **arrays)
    return str(folder / "data.npz")


def test_strings_of_a_file_are_learnt_evaluated_and_predicted(tmp_path, capsys):
    data, run, out = saved(tmp_path, x=X, y=Y), tmp_path / "run", tmp_path / "out.npy"
    words = [f"--{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in QUICK.items()
             if name != "quiet"]
    calls = ["train", "--data", data, "--out", run, *words], ["predict", run, data, "-o", out], ["evaluate", run, "--json"]
    for args in calls:
        with pytest.raises(SystemExit, match="0"):
            main([str(word) for word in args])
    test = arrays_data(X, Y).test.read([range(48)])[0][1]
    assert np.array_equal(np.load(out), np.unique(Y)[test])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["accuracy"] == 1.0
    assert np.array_equal(mpiddl.load(run).predict(X), Y)
    np.save(tmp_path / "rows.npy", X)
    virtual.run(5, lambda comm: predict_run(run, str(tmp_path / "rows.npy"), out, comm=comm))
    assert np.array_equal(np.load(out), Y)
    predict_run(run, str(tmp_path / "rows.npy"), out, raw=True)
    assert np.load(out).shape == (240, 3)


def test_other_rows_are_evaluated_by_the_classes_of_the_training(tmp_path):
    """Rows without one of the classes: their own numbering would be another."""
    mpiddl.train("mlp", (X, Y), out=tmp_path / "run", **QUICK)
    part = Y != "apple"
    some = saved(tmp_path, x=X, y=Y, x_test=X[part], y_test=Y[part])
    assert evaluate_run(tmp_path / "run", some)["accuracy"] == 1.0
    alone = saved(tmp_path, x=X[part], y=Y[part])
    assert evaluate_run(tmp_path / "run", alone)["accuracy"] == 1.0


def test_a_regression_is_evaluated_without_an_accuracy(tmp_path, capsys):
    data = saved(tmp_path, x=X, y=X[:, 0])
    mpiddl.train("mlp", data, loss="squared-error", out=tmp_path / "run", **SLOW)
    for words in ([], ["--json"]):
        with pytest.raises(SystemExit, match="0"):
            main(["evaluate", str(tmp_path / "run"), *words])
    for_people, for_programs = capsys.readouterr().out.rsplit("\n{", 1)
    assert "loss" in for_people and "accuracy" not in for_people
    assert json.loads("{" + for_programs)["accuracy"] is None


UNKNOWN = {
    "a label that was not trained": (np.where(np.arange(240) == 7, "plum", Y),
                                     "row 7: got label 'plum', expected one of the 3 labels 'apple', 'fig', 'pear'"),
    "numbers": (np.arange(240) % 3, "y in"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_labels_that_the_model_does_not_know_are_one_error(tmp_path, capsys, case):
    labels, word = UNKNOWN[case]
    mpiddl.train("mlp", (X, Y), out=tmp_path / "run", **QUICK)
    with pytest.raises(SystemExit) as end:
        main(["evaluate", str(tmp_path / "run"), "--data", saved(tmp_path, x=X, y=labels)])
    expect(Finished(end.value.code, *capsys.readouterr()), 1, word)


def test_strings_where_class_numbers_were_trained(tmp_path):
    mpiddl.train("mlp", (X, np.arange(240) % 3), out=tmp_path / "run", **QUICK)
    with pytest.raises(DataError, match="got the 3 labels 'apple', 'fig', 'pear', expected class numbers"):
        evaluate_run(tmp_path / "run", saved(tmp_path, x=X, y=Y))


BAD = {
    "a test label that training has not": ((X, Y), (X[:2], ["fig", "plum"]), {}, "y_test, row 1: got label 'plum'"),
    "numbers to test on": ((X, Y), (X[:2], [0, 1]), {}, "y_test: got labels of dtype int64"),
    "strings to test on": ((X, np.arange(240) % 3), (X[:2], ["fig", "pear"]), {}, "y_test: got strings, expected class"),
    "a missing label": ((X, np.where(np.arange(240) == 5, None, Y.astype(object))), None, {}, "y, row 5: got label None"),
    "bytes in Latin-1": ((X, np.char.encode(np.where(Y == "pear", "p\xeaar", Y), "latin-1")), None, {},
                         r"y, row \d+: got label b'p\\xeaar', expected UTF-8"),
    "numbers written as strings": ((X, np.arange(240.0).astype(str)), None, {}, r"240 different strings .*y\.astype\(float\)"),
    "a regression": ((X, Y), None, {"loss": "squared-error"}, "y: got strings, expected numbers, because the task"),
    "one-hot rows": ((X, np.stack([Y, Y], 1)), None, {}, "class numbers of shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_labels_that_cannot_be_taken(case):
    data, test, more, message = BAD[case]

    def program(comm):
        with pytest.raises(DataError, match=message):
            mpiddl.train("mlp", data, test=test, comm=comm, **{**QUICK, **more})

    virtual.run(2, program)


def test_ranks_with_the_same_strings_agree_and_with_others_do_not():
    """Objects have another address on each rank, and the same contents."""

    def program(comm, other):
        labels = np.array([f"{name}{'s' * (comm.rank * other)}" for name in Y], object)
        return mpiddl.train("mlp", (X, labels), comm=comm, **QUICK)

    virtual.run(2, lambda comm: program(comm, 0))
    with pytest.raises(MismatchError, match="contents"):
        virtual.run(2, lambda comm: program(comm, 1))


def extended(array, rank):
    """In extended precision, whose padding is different on each rank."""
    x = np.asarray(array, np.longdouble)
    x.reshape(-1).view(np.uint8).reshape(-1, x.itemsize)[:, 10:] = rank
    assert np.array_equal(x, array)
    return x


@pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="no floats of 80 bits")
def test_extended_floats_are_equal_whatever_is_in_their_padding():
    def train(comm, more=0):
        x, y = (extended(each, comm.rank) for each in (X, X.sum(axis=1) + more * comm.rank))
        mpiddl.train("mlp", (x, y), comm=comm, loss="squared-error", **SLOW)

    virtual.run(3, train)
    with pytest.raises(MismatchError, match="contents"):
        virtual.run(3, partial(train, more=1e-3))


def test_a_run_goes_on_with_the_same_labels_only(tmp_path):
    job = {**QUICK, "out": tmp_path / "run"}
    mpiddl.train("mlp", (X, Y), **{**job, "epochs": 1})
    with pytest.raises(CheckpointError, match=r"got the 3 labels 'fig', 'kiwi', 'pear', expected .* 'apple', 'fig', 'pear'"):
        mpiddl.train("mlp", (X, np.where(Y == "apple", "kiwi", Y)), resume=True, **job)
    assert np.array_equal(mpiddl.train("mlp", (X, Y), resume=True, **job).predict(X), Y)


class Scores:
    """A user's own model whose outputs are no columns of classes."""

    shapes = {"w": (2,)}

    def init(self, params, rng):
        params["w"][:] = 0

    def gradient(self, params, x, y, grad):
        grad["w"][:] = 0
        return 0.0

    def predict(self, params, x):
        return x @ params["w"]


def test_outputs_that_name_no_class():
    result = mpiddl.train(Scores(), (X, Y), **QUICK)
    assert result.outputs(X).shape == (240,)
    with pytest.raises(mpiddl.errors.ShapeError, match=r"model.predict: returned shape \(240,\), expected \(n, 3\)"):
        result.predict(X)


@pytest.mark.parametrize("shape", [(240,), (240, 1), (240, 2)], ids=str)
def test_targets_come_back_in_the_shape_that_they_had(tmp_path, shape):
    y = np.resize(X.sum(axis=1), shape)
    result = mpiddl.train("mlp", (X, y), out=tmp_path / "run", **SLOW)
    np.save(tmp_path / "rows.npy", X)
    predict_run(tmp_path / "run", str(tmp_path / "rows.npy"), tmp_path / "out.npy")
    for found in (result.predict(X), mpiddl.load(tmp_path / "run").predict(X), np.load(tmp_path / "out.npy")):
        assert found.shape == shape
        np.testing.assert_allclose(found, result.predict(X), rtol=1e-4, atol=1e-5)
    assert result.outputs(X).shape == (240, shape[-1] if shape[1:] else 1)


def test_a_checkpoint_from_before_is_read(tmp_path):
    """It tells neither class names nor the shape of targets."""
    result = mpiddl.train("mlp", (X, X.sum(axis=1)), out=tmp_path, **SLOW)
    manifest = checkpoint.find(tmp_path) / "manifest.json"
    content = json.loads(manifest.read_text())
    for name in ("class_names", "targets"):
        del content["data"][name]
    content["sha256"] = checkpoint._seal(content)
    manifest.write_text(json.dumps(content))
    assert np.array_equal(mpiddl.load(tmp_path).predict(X), result.outputs(X))
    mpiddl.train("mlp", (X, X.sum(axis=1)), out=tmp_path, resume=True, **{**SLOW, "epochs": 8})


@pytest.mark.mpi
def test_strings_on_the_ranks_of_mpi(comm):
    result = mpiddl.train("mlp", (X, Y.astype(object)), comm=comm, **QUICK)
    assert np.array_equal(result.predict(X), Y) and result.summary["test_accuracy"] == 1.0


def test_numbers_with_gaps_are_refused_with_the_remedy():
    with pytest.raises(DataError, match=r"row 2: got label 9, .*\. Convert other labels to strings with y\.astype\(str\)"):
        mpiddl.train("mlp", (X, np.resize([3, 7, 9], 240)), **QUICK)
    result = mpiddl.train("mlp", (X, np.resize([3, 7, 9], 240).astype(str)), **QUICK)
    assert result.predict(X[:3]).tolist() == ["3", "7", "9"]
