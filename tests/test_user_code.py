"""A user's own model, strategy and optimiser by name: in training, evaluation, prediction, job files and comparisons."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from harness.jobs import Finished, expect

import mpiddl
from mpiddl.cli import main
from mpiddl.compare.grid import make_grid
from mpiddl.errors import CheckpointError, UsageError
from mpiddl.registry import MODELS
from mpiddl.strategies import AllReduce, make_strategy, spelled
from mpiddl.training.inference import evaluate_run, predict_run
from mpiddl.transport import virtual
from mpiddl.user_code import make, source_checksum

pytestmark = pytest.mark.no_mpi

SOURCE = '''
from dataclasses import dataclass
import numpy as np
from mpiddl import MLP, Score
from mpiddl.optim import SGD
from mpiddl.strategies import AllReduce, Strategy

@dataclass(frozen=True)
class Linear:
    """Scores of the classes, learnt by squared error."""
    features: int
    outputs: int
    start: float = 0.0

    @property
    def shapes(self):
        return {"w": (self.features, self.outputs)}

    def init(self, params, rng):
        params["w"][:] = self.start

    def gradient(self, params, x, y, grad):
        scores = self.predict(params, x)
        error = scores - np.eye(self.outputs)[y]
        grad["w"][:] = x.T @ error
        return Score((error ** 2).sum() / 2, int((scores.argmax(1) == y).sum()))

    def predict(self, params, x):
        return x @ params["w"]

class Column(Linear):
    """One output of shape (n,)."""
    def gradient(self, params, x, y, grad):
        grad["w"][:] = 0
        return 0.0
    def predict(self, params, x):
        return super().predict(params, x)[:, 0]

class MLP2(Linear):
    pass

MLP2.__name__ = "MLP"

def net(features, outputs, width=4):
    return MLP((features, width, outputs))

class Plain:
    def __init__(self, shrink=0.0):
        self.shrink = shrink
    def init(self, n, dtype):
        return {}
    def update(self, params, grad, moments, rate, scale=1.0, step=0):
        params *= 1 - rate * self.shrink
        params -= rate * scale * grad

class Summing(AllReduce):
    """Sums as the MPI library does it.

    And more words.
    """

class Keeping(Strategy):
    """Nothing is sent."""
    replicated = False
    def __init__(self, period=1):
        self.period = period

class Broken(Plain):
    def __init__(self):
        raise RuntimeError("no table\\nfound")

sgd = SGD(momentum=0.5)
'''
TRAIN = ("train", "--epochs", "2", "--quiet", "--rate", "0.05")
OWN = ("--model", "own_code:Linear:start=0.25", "--strategy", "own_code:Summing", "--optimiser", "own_code:Plain:shrink=0.01")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory, with the module in it; it is forgotten afterwards."""
    (tmp_path / "own_code.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as a console script has it
    yield tmp_path
    for name in ("own_code", "other_code"):
        sys.modules.pop(name, None)


def call(*words):
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return end.value.code


def weights(run):
    return json.loads((run / "summary.json").read_text())["checkpoint_sha256"]


def test_own_code_trains_is_evaluated_and_predicts(folder, capsys):
    run, out = folder / "run", folder / "out.npy"
    assert call(*TRAIN, *OWN, "--out", run) == 0
    model = ("--model", "own_code:Linear")
    assert call("evaluate", run, *model, "--json") == call("predict", run, "digits", "-o", out, *model) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[0])
    assert found["accuracy"] == json.loads((run / "summary.json").read_text())["test_accuracy"] > 0.8
    assert np.load(out).shape == (360,) and np.load(out).dtype == np.int64
    assert 'model = "own_code:Linear:start=0.25"\n' in (run / "job.toml").read_text()


def test_the_settings_that_are_kept_make_the_run_again(folder):
    """As the text: for a run from job.toml, and for one that goes on."""
    assert call(*TRAIN, *OWN, "--out", "run") == call("train", "run/job.toml", "--quiet", "--out", "again") == 0
    assert call(*TRAIN, *OWN, "--max-steps", "20", "--out", "cut") == call(*TRAIN[:4], *OWN, "--max-steps", "0", "--out",
                                                                          "cut", "--resume") == 0
    assert weights(folder / "run") == weights(folder / "again") == weights(folder / "cut")


def test_names_and_objects_are_the_same(folder):
    settings = {"epochs": 2, "quiet": True, "rate": 0.05}
    named = mpiddl.train("own_code:Linear", "digits", optimiser="own_code:Plain", strategy="own_code:Summing", **settings)
    import own_code

    given = mpiddl.train(own_code.Linear(64, 10), "digits", optimiser=own_code.Plain(), strategy=own_code.Summing(), **settings)
    assert named.params["w"].tobytes() == given.params["w"].tobytes() and np.any(named.params["w"])


def test_on_ranks_of_mpi(mpirun, folder):
    done = mpirun(3, "mpiddl", *TRAIN, *OWN, "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    done = mpirun(2, "mpiddl", "evaluate", "run", "--model", "own_code:Linear", cwd=folder)
    assert done.returncode == 0 and done.stdout.count("accuracy") == 1, done.stderr


@pytest.mark.parametrize(("words", "message"), [
    (("--strategy", "own_code:Sum"), "expected a name that own_code defines"),
    (("--optimiser", "own_code:Broken"), "own_code:Broken could not be created"),
])  # fmt: skip
def test_a_mistake_is_one_message_of_all_ranks(mpirun, folder, words, message):
    expect(mpirun(3, "mpiddl", *TRAIN, *words, cwd=folder), 2, message)


def test_a_model_is_loaded_with_the_class_that_was_trained(folder):
    result = mpiddl.train("own_code:Linear:start=0.25", "digits", epochs=1, out="run", quiet=True)
    import own_code

    x = np.random.default_rng(0).random((5, 64))
    for model in (own_code.Linear(64, 10), "own_code:Linear"):
        assert np.array_equal(mpiddl.load("run", model=model).predict(x), result.predict(x))


def test_code_that_only_a_checkpoint_names_is_not_imported(folder, capsys):
    mpiddl.train("own_code:Linear", "digits", epochs=1, out="run", quiet=True)
    del sys.modules["own_code"]
    with pytest.raises(CheckpointError, match=r"own model \(Linear\), .*: mpiddl\.load\('run/.*', model=Linear\(\.\.\.\)\)"):
        mpiddl.load("run")
    for words in (["evaluate", "run"], ["predict", "run", "digits", "-o", "out.npy"]):
        code = call(*words)
        expect(Finished(code, *capsys.readouterr()), 1, "expected this model as well: `--model own_code:Linear`\n")
    with pytest.raises(CheckpointError, match="expected this model as well: `model='own_code:Linear'`"):
        evaluate_run("run")
    assert "own_code" not in sys.modules
    mpiddl.train("own_code:MLP2", "digits", epochs=1, out="run", overwrite=True, quiet=True)
    with pytest.raises(CheckpointError, match="expected this model as well"):
        mpiddl.load("run")


@pytest.mark.parametrize(("name", "given"), [("model", OWN[1]), ("strategy", OWN[3]), ("optimiser", OWN[5])])
def test_code_that_only_a_checkpoint_names_is_not_imported_on_resume(folder, capsys, name, given):
    assert call(*TRAIN, f"--{name}", given, "--out", "run") == 0
    del sys.modules["own_code"]
    for more in ((), ("--dry-run",)):
        code = call(*TRAIN, "--epochs", "3", "--out", "run", "--resume", *more)
        expect(Finished(code, *capsys.readouterr()), 2, f"from another person: `--{name} {given}`\n")
    with pytest.raises(UsageError, match=f"{name}: got '{given}' only from run/.*, .* `{name}='{given}'`"):
        mpiddl.train(data="digits", epochs=3, rate=0.05, out="run", resume=True, quiet=True)
    assert "own_code" not in sys.modules
    assert call(*TRAIN, "--epochs", "3", f"--{name}", given, "--out", "run", "--resume") == 0


def test_an_object_in_the_place_of_the_name_continues_a_run(folder):
    settings = {"optimiser": "own_code:Plain", "rate": 0.05, "out": "run", "quiet": True}
    mpiddl.train("own_code:Linear", "digits", strategy="own_code:Summing", epochs=1, **settings)
    import own_code

    again = {"strategy": own_code.Summing(), "epochs": 2, "resume": True}
    assert mpiddl.train(own_code.Linear(64, 10), "digits", **settings | again).summary["epochs"] == 2


@pytest.mark.parametrize("name", ["os:system:command=exit", "own_code:SGD"])
def test_only_what_the_module_defines_is_called(name):
    """Any module has functions such as os.system; a package has what its modules define."""
    with pytest.raises(UsageError, match=r"imports from (posix|mpiddl\.optim\.sgd), expected the module that defines it: "):
        make("model", name)
    assert make("optimiser", "mpiddl.optim:SGD:momentum=0.5").momentum == 0.5


def test_a_network_of_mpiddl_is_found_whoever_made_it(folder):
    """By its sizes, not by the settings: those tell nothing of an object."""
    x = np.zeros((3, 64))
    for model in (mpiddl.MLP((64, 5, 10), activation="tanh"), "own_code:net:width=3", "softmax"):
        result = mpiddl.train(model, "digits", epochs=1, out="run", overwrite=True, quiet=True)
        assert mpiddl.load("run").model == result.model
        assert np.array_equal(mpiddl.load("run").predict(x), result.predict(x))


MISFITS = {
    "another shape": ("own_code:net:width=3", r"weight1: got float32 of shape \(64, 4\), expected .* \(64, 3\)"),
    "other names": ("own_code:Linear", r"w: got nothing, expected float32 of shape \(64, 10\)"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_model_that_does_not_fit_is_told_with_both_shapes(folder, case):
    name, message = MISFITS[case]
    mpiddl.train("own_code:net", "digits", epochs=1, out="run", quiet=True)
    with pytest.raises(CheckpointError, match=message):
        mpiddl.load("run", model=name)


@pytest.mark.parametrize("raw", [True, False])
def test_outputs_of_an_own_model_in_a_file(folder, raw):
    """Its outputs have the shape that it gives them; classes need a column each."""
    result = mpiddl.train("own_code:Column", "digits", epochs=0, out="run", quiet=True)
    x = np.random.default_rng(0).random((7, 64))
    np.save("rows.npy", x)

    def program(comm):
        return predict_run(folder / "run", "rows.npy", folder / "out.npy", raw, comm, model="own_code:Column")

    if raw:
        virtual.run(3, program)
        assert np.array_equal(np.load("out.npy"), result.outputs(x)) and result.outputs(x).shape == (7,)
    else:
        with pytest.raises(UsageError, match=r"returned shape \(1,\), expected \(n, 10\)"):
            virtual.run(3, program)
    assert evaluate_run(folder / "run", model="own_code:Column")["rows"] == 360


def test_parameters_are_literals_or_words():
    made = make("model", "own_code:Keeping:period=3")
    assert made.period == 3
    found = make("x", "types:SimpleNamespace:a=1,b=2.5,c=true,d=word,e=None,f=-1e-3")
    assert vars(found) == {"a": 1, "b": 2.5, "c": True, "d": "word", "e": None, "f": -1e-3}
    assert make("optimiser", "own_code:sgd", ("init", "update")).momentum == 0.5


def test_strategies_by_name():
    assert type(make_strategy("own_code:Summing")).__name__ == "Summing"
    assert make_strategy("own_code:Keeping:period=4").period == 4
    with pytest.raises(UsageError, match=r"strategy: got Plain, expected a name or an object of mpiddl\.strategies"):
        make_strategy("own_code:Plain")


WRONG = {
    "no module": (("--model", "nowhere:Net"), "model: got 'nowhere:Net', whose module cannot be imported"),
    "a file": (("--model", "own_code.py:Linear"), "expected the module's name without .py: own_code:Linear"),
    "no such name": (("--model", "own_code:Lin"), "expected a name that own_code defines: Linear, Column, "),
    "no model": (("--model", "own_code:Plain"), "model: got Plain without the attributes shapes, gradient, predict"),
    "no optimiser": (("--optimiser", "own_code:Linear:features=1,outputs=1"), "got Linear without the attributes update"),
    "no strategy": (("--strategy", "own_code:Plain"), "strategy: got Plain, expected a name"),
    "unknown parameter": (("--optimiser", "own_code:Plain:shrnk=1"), "unexpected keyword argument 'shrnk'"),
    "its parameters": (("--optimiser", "own_code:Plain:shrnk=1"), "expected key=value for parameters of (shrink=0.0)"),
    "no parameter": (("--optimiser", "own_code:Plain:0.1"), "optimiser: got '0.1' in 'own_code:Plain:0.1', expected key=value"),
    "a missing parameter": (("--optimiser", "own_code:net"), "missing a required argument: 'features'"),
    "parameters of an object": (("--optimiser", "own_code:sgd:momentum=1"), "expected no parameters: own_code:sgd is"),
    "an exception": (("--optimiser", "own_code:Broken"), "could not be created (RuntimeError: no table found, own_code.py"),
    "bad syntax": (("--model", "other_code:Net"), "cannot be imported (SyntaxError"),
    "a program": (("--model", "third_code:Net"), "cannot be imported (SystemExit: no arguments"),
    "a value of ours": (("--optimiser", "mpiddl.optim:SGD:momentum=2"), "optimiser: mpiddl.optim:SGD:momentum=2: momentum: "),
    "a typo": (("--model", "mpl"), f"expected one of {', '.join(MODELS)}, or MODULE:CLASS; did you mean 'mlp'?"),
    "its own decay": (("--optimiser", "own_code:Plain", "--weight-decay", "0.1"), "or MODULE:CLASS:weight_decay=0.1"),
}


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--simulate", "2")], ids=["run", "dry run", "simulated"])
@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_message(folder, capsys, case, more):
    words, message = WRONG[case]
    (folder / "other_code.py").write_text("class Net(:\n")
    (folder / "third_code.py").write_text("raise SystemExit('no arguments')\n")
    code = call(*TRAIN, *words, *more)
    done = Finished(code, *capsys.readouterr())
    expect(done, 2, message)
    assert done.stderr.count("\n") == 1 or "Try" in done.stderr


@pytest.mark.parametrize("command", ["evaluate", "predict"])
@pytest.mark.parametrize("name", ["mlp", "nowhere:Net", "own_code:Plain"])
def test_a_model_that_is_none_where_one_is_used(capsys, command, name):
    mpiddl.train("own_code:Linear", "digits", epochs=1, out="run", quiet=True)
    code = call(command, "run", *(("digits", "-o", "out.npy") if command == "predict" else ()), "--model", name)
    expect(Finished(code, *capsys.readouterr()), 2, "model: got ")


@pytest.mark.more
def test_a_comparison_of_own_code(folder, capsys):
    (folder / "job.toml").write_text("""
[train]
epochs = 1
model = "own_code:Linear"
[compare]
strategies = [
  "allreduce", "own_code:Summing", "own_code:Keeping:period=2",
  {strategy = "asgd", optimizer = "own_code:Plain", lr = 0.01},
]
workers = 2
seeds = 1
""")
    assert call("compare", "job.toml", "--simulate", "--out", "out", "--quiet") == 0
    rows = json.loads((folder / "out" / "report.json").read_text())["rows"]
    assert [row["strategy"] for row in rows][1:3] == ["own_code:Summing", "own_code:Keeping:period=2"]
    assert not any(row["failed"] or row["diverged"] for row in rows)
    report = (folder / "out" / "report.md").read_text()
    assert "Sums as the MPI library does it." in report and "Nothing is sent." in report


@pytest.mark.more
def test_a_comparison_with_a_run_that_fails_has_exit_code_1(folder, capsys):
    (folder / "failing.py").write_text("""
from mpiddl.strategies import AllReduce
class Failing(AllReduce):
    def combine(self, *arguments):
        raise OSError("no route")
""")
    (folder / "job.toml").write_text("""
[train]
epochs = 1
[compare]
strategies = ["allreduce", "failing:Failing"]
workers = 2
seeds = 1
""")
    assert call("compare", "job.toml", "--simulate", "--out", "out", "--quiet") == 1
    good, bad = json.loads((folder / "out" / "report.json").read_text())["rows"]
    assert not good["failed"] and "no route" in bad["failed"]["1"]


def test_own_strategies_that_look_alike_are_told_apart():
    """A class that has no repr of its own shows no parameters."""
    asked = {"strategies": ["own_code:Keeping:period=2", "own_code:Keeping:period=3"], "seeds": 1}
    one, other = make_grid({}, asked).contenders
    assert one.identity != other.identity


def test_changed_code_is_other_code(folder):
    before = source_checksum("own_code:Plain")
    (folder / "own_code.py").write_text(SOURCE + "\n# changed\n")
    assert source_checksum("own_code:Plain") != before


@dataclass(frozen=True)
class Ruled(AllReduce):
    """A strategy whose ``rule`` is none of ours."""

    rule: str = "mean"


def test_a_strategy_with_a_field_called_rule_is_described_whole():
    assert spelled(Ruled("median")) == "Ruled(rule='median')"


def test_modules_without_a_file_have_no_checksum(tmp_path, monkeypatch):
    (tmp_path / "folder_without_init").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert source_checksum("sys:exit") == source_checksum("folder_without_init:__path__") == 0
