"""What users of the Python API do wrong: one error, on every rank, that says what came and what was wanted."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from mpi4py import MPI

import mpiddl
from mpiddl.errors import CommError, ConvergenceError, DataError, MismatchError, MpiddlError, ShapeError, UsageError
from mpiddl.optim import SGD
from mpiddl.strategies import AllReduce, Combined, Strategy, chain, describe
from mpiddl.training import checkpoint
from mpiddl.training.run_folder import Folder
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

X, Y = np.random.default_rng(0).standard_normal((60, 3)), np.arange(60.0)
QUICK = {"epochs": 2, "batch": 10, "quiet": True}


class Linear:
    """A model of a user's own, with one mistake at a time."""

    shapes = {"w": (3,)}

    def init(self, params, rng):
        params["w"][:] = 0

    def gradient(self, params, x, y, grad):
        error = x @ params["w"] - y
        grad["w"][:] = x.T @ error
        return (error @ error) / 2

    def predict(self, params, x):
        return x @ params["w"]


class Rebinding(Linear):
    def gradient(self, params, x, y, grad):
        grad["w"] = x.T @ (x @ params["w"] - y)
        return 0.0


class Returning(Linear):
    def init(self, params, rng):
        return {"w": np.ones(3)}


class Silent(Linear):
    def gradient(self, params, x, y, grad):
        super().gradient(params, x, y, grad)


class Infinite(Linear):
    def init(self, params, rng):
        params["w"][1] = np.inf


class Listed(Linear):
    shapes = [("w", (3,))]


class Partial(Linear):
    predict = property()


WRONG = [
    ((Rebinding(), (X, Y)), ShapeError, r"w: got another array, expected a change of the values in place"),
    ((Returning(), (X, Y)), UsageError, r"model\.init: returned a value"),
    ((Infinite(), (X, Y)), UsageError, r"model\.init: wrote nan or inf to 'w'"),
    ((Silent(), (X, Y)), UsageError, r"model\.gradient: returned NoneType"),
    ((Listed(), (X, Y)), UsageError, r"model\.shapes: got list"),
    ((Partial(), (X, Y)), UsageError, "without the attributes predict"),
    ((Linear, (X, Y)), UsageError, "got the class Linear, expected an object of this class"),
    ((Linear(), X), UsageError, "data: got ndarray, expected"),
    ((Linear(), (X, Y, Y)), UsageError, "data: got 3 arrays"),
    (("mlp", 42), UsageError, "data: got int"),
    ((Linear(), (X, Y[:-1])), MpiddlError, "60"),
    ((Linear(), (X.astype(object), Y)), MpiddlError, "object"),
    ((Linear(), (X * np.nan, Y)), MpiddlError, "nan|finite"),
    (("mlp", (X, Y.astype(str))), MpiddlError, "got 60 different strings in 60 rows"),
    (("mlp", (X, -np.arange(60))), MpiddlError, "label -1"),
]


@pytest.mark.parametrize(("args", "kind", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_a_mistake_is_told_on_every_rank(args, kind, message):
    told = []

    def program(comm):
        with pytest.raises(kind, match=message) as caught:
            mpiddl.train(*args, comm=comm, **QUICK)
        told.append(str(caught.value))

    virtual.run(2, program)
    assert len(told) == 2 and told[0] == told[1]


def test_an_optimiser_that_is_a_class():
    with pytest.raises(UsageError, match="optimiser: got the class SGD"):
        mpiddl.train(Linear(), (X, Y), optimiser=SGD, **QUICK)


class Moments(SGD):
    """An optimiser that makes, or puts in the place of its moments, what is asked for."""

    def __init__(self, made, put=None):
        super().__init__()
        object.__setattr__(self, "made", made)
        object.__setattr__(self, "put", put)

    def init(self, n, dtype):
        return self.made(n)

    def update(self, params, grad, moments, rate, scale=1.0, step=0):
        self.put(moments)


@pytest.mark.parametrize(("made", "message"), [
    (lambda n: None, "optimiser.init: returned None, expected a dict of arrays"),
    (lambda n: [np.zeros(n)], r"optimiser.init: returned \[.*, expected a dict of arrays"),
    (lambda n: {"m": 0.0}, "optimiser.init: returned {'m': 0.0}, expected a dict of arrays"),
    (lambda n: {"m": np.zeros(n - 1, np.float32)}, r"optimiser.init: returned float32 of shape .* as 'm'"),
    (lambda n: {"m": np.zeros(n, int)}, r"optimiser.init: returned int64 .*, expected float32"),
])  # fmt: skip
def test_moments_of_another_kind(made, message):
    with pytest.raises(UsageError, match=message):
        mpiddl.train(Linear(), (X, Y), optimiser=Moments(made), **QUICK)


@pytest.mark.parametrize(("put", "message"), [
    (lambda moments: moments.update(m=np.zeros(3)), r"m: got another array, .* moments\['m'\]\[:\]"),
    (lambda moments: moments.pop("m"), "m: the array was removed"),
    (lambda moments: moments.__delitem__("m"), "m: the array was removed"),
    (lambda moments: moments.clear(), "all arrays were removed"),
])  # fmt: skip
def test_moments_are_written_into(put, message):
    with pytest.raises(UsageError, match=message):
        mpiddl.train(Linear(), (X, Y), optimiser=Moments(lambda n: {"m": np.zeros(n, np.float32)}, put), **QUICK)


@pytest.mark.parametrize("returned", [None, (np.zeros(3), 10, None)])
def test_a_strategy_that_combines_to_something_else(returned):
    class Own(AllReduce):
        def combine(self, comm, state, grad, replica, step):
            return returned

    with pytest.raises(UsageError, match=f"strategy.combine: returned {type(returned).__name__}, expected Combined"):
        mpiddl.train(Linear(), (X, Y), strategy=Own(), **QUICK)


@pytest.mark.parametrize(("returned", "shown"), [
    (None, "NoneType"), ([0.0] * 60, "list"), (np.zeros(3), r"shape \(3,\)"), (np.float64(1), "float64"),
])  # fmt: skip
def test_predictions_that_are_not_one_a_row(returned, shown):
    class Own(Linear):
        def predict(self, params, x):
            return returned

    result = mpiddl.train(Own(), (X, Y), **QUICK)
    with pytest.raises(ShapeError, match=f"model.predict: returned {shown}, expected an array with one row .*60"):
        result.predict(X)


def test_rows_that_are_not_finite_are_not_predicted():
    result = mpiddl.train("mlp", "digits", epochs=0, quiet=True)
    x = np.zeros((5, 64))
    for value, came in (np.nan, "nan"), (np.inf, "inf"), (1e300, "1e\\+300"):
        x[2, 3] = value
        said = rf"^x: got {came} in row 2, column 3, expected finite numbers of float32"
        for call in (result.predict, result.outputs):
            with warnings.catch_warnings(action="ignore"), pytest.raises(DataError, match=said):
                call(x)


def test_updates_that_change_nothing_are_told(capsys):
    class Rebinding(SGD):
        def update(self, params, grad, moments, rate, scale=1.0, step=0):
            params = params - rate * scale * grad

    said = "updates changed no parameter. An optimiser of your own must change params in place"
    mpiddl.train(Linear(), (X, Y), optimiser=Rebinding(), **QUICK | {"quiet": False})
    assert f"10 {said}" in capsys.readouterr().err
    mpiddl.train(Linear(), (X, Y), **QUICK | {"quiet": False})
    assert said not in capsys.readouterr().err


def test_ranks_of_an_own_strategy_that_drift_apart():
    class Drifting(Strategy):
        def __init__(self):
            self.factor, self._kept = 0.5, 3

        def combine(self, comm, state, grad, replica, step):
            return Combined(grad, step.count, state)

    assert describe(Drifting()).endswith("Drifting(factor=0.5)")

    def program(comm):
        with pytest.raises(MismatchError, match="set replicated = False in Drifting; otherwise combine") as caught:
            mpiddl.train(Linear(), (X, Y), comm=comm, strategy=Drifting(), **QUICK)
        assert caught.value.exit_code == 1

    virtual.run(2, program)


def test_a_result_is_shown_without_its_parameters():
    shown = repr(mpiddl.train(Linear(), (X, Y), **QUICK))
    assert shown.startswith("Result(strategy='AllReduce()', ranks=1, steps=10, test_loss=") and len(shown) < 100


def test_a_strategy_that_is_none():
    with pytest.raises(UsageError, match=r"strategy: got the class AllReduce, expected an object of this class: AllReduce\("):
        mpiddl.train(Linear(), (X, Y), strategy=AllReduce, **QUICK)
    with pytest.raises(UsageError, match="strategy: got int"):
        mpiddl.train(Linear(), (X, Y), strategy=3, **QUICK)


def test_test_rows_beside_a_named_data_set():
    with pytest.raises(UsageError, match="test: got test rows for a named data set"):
        mpiddl.train("mlp", "digits", test=(X, Y), **QUICK)


def test_lists_and_foreign_layouts_are_taken():
    plain = mpiddl.train(Linear(), (X, Y), **QUICK)
    listed = mpiddl.train(Linear(), [X.tolist(), Y.tolist()], **QUICK)
    strided = mpiddl.train(Linear(), (np.asfortranarray(X), np.repeat(Y, 2)[::2]), **QUICK)
    assert plain.params["w"].tobytes() == listed.params["w"].tobytes() == strided.params["w"].tobytes()


@pytest.mark.parametrize("differ", ["rows", "values"])
def test_ranks_that_bring_different_arrays(differ):
    def program(comm):
        x, y = (X[: 40 + 10 * comm.rank], Y[: 40 + 10 * comm.rank]) if differ == "rows" else (X, Y + comm.rank)
        with pytest.raises(MismatchError, match=r"data: .*rank 1"):
            mpiddl.train(Linear(), (x, y), comm=comm, **QUICK)

    virtual.run(2, program)


def test_optimisers_that_differ():
    def program(comm):
        with pytest.raises(MismatchError, match="optimiser object: rank 0 got 'SGD"):
            mpiddl.train(Linear(), (X, Y), comm=comm, optimiser=SGD(momentum=0.1 * comm.rank), **QUICK)

    virtual.run(2, program)


def test_replicas_that_differ_in_the_end_are_found():
    class Drifting(Strategy):
        def finish(self, comm, state, replica):
            replica.params += comm.rank

    with pytest.raises(MismatchError, match="differ from those of rank 0"):
        virtual.run(2, lambda comm: mpiddl.train(Linear(), (X, Y), comm=comm, strategy=Drifting(), **QUICK))


def test_a_diverging_run_says_so_instead_of_going_on():
    with pytest.raises(ConvergenceError, match="diverged at rate 1e\\+30"):
        mpiddl.train("mlp", "digits", rate=1e30, schedule="constant", **QUICK)


def test_adding_to_a_view_is_changing_it():
    class Adding(Linear):
        def gradient(self, params, x, y, grad):
            grad["w"][:] = 0
            grad["w"] += x.T @ (x @ params["w"] - y)
            return float(((x @ params["w"] - y) ** 2).sum() / 2)

    adding, plain = (mpiddl.train(model, (X, Y), **QUICK) for model in (Adding(), Linear()))
    assert adding.params["w"].tobytes() == plain.params["w"].tobytes()


class Counting(Strategy):
    """Counts its steps, in a state that has to survive."""

    def init(self, comm, replica):
        return {"n": 0}

    def mix(self, comm, state, replica, step):
        self.seen = state["n"] + 1
        return {"n": self.seen}


def test_a_strategy_has_the_same_name_in_every_process(tmp_path):
    assert describe(chain(Counting(), Counting())) == "chain(Counting(), Counting())"
    mpiddl.train("mlp", "digits", strategy=Counting(), max_steps=10, out=tmp_path, **QUICK)
    again = Counting()
    mpiddl.train("mlp", "digits", strategy=again, max_steps=20, out=tmp_path, resume=True, **QUICK)
    assert again.seen == 20


def test_another_strategy_goes_on_from_the_one_model(tmp_path, capsys):
    job = {**QUICK, "out": tmp_path, "batch": 60}

    def program(comm, **change):
        return mpiddl.train("mlp", "digits", comm=comm, **{**job, **change})

    virtual.run(2, lambda comm: program(comm, strategy="local-sgd", epochs=1))
    virtual.run(2, lambda comm: program(comm, strategy="allreduce", resume=True, quiet=False))
    assert "written by LocalSGD(period=8): from the common model in it, without the " in capsys.readouterr().err


def test_an_optimiser_that_was_not_chosen_follows_another_strategy(tmp_path, capsys):
    job = {**QUICK, "out": tmp_path / "run", "simulate": 2}
    mpiddl.train("mlp", "digits", strategy="allreduce", max_steps=4, **job)
    again = {**job, "strategy": "ddc-asgd", "resume": True}
    mpiddl.train("mlp", "digits", **again | {"max_steps": 8, "quiet": False})
    assert "; optimiser nesterov instead of momentum, as the strategy requires" in capsys.readouterr().err
    assert checkpoint.load_manifest(checkpoint.find(tmp_path / "run"))["job"]["optimiser"] == "nesterov"
    mpiddl.train("mlp", "digits", **again | {"strategy": "dana", "max_steps": 12})
    chosen = {**job, "out": tmp_path / "chosen"}
    mpiddl.train("mlp", "digits", optimiser="momentum", strategy="allreduce", max_steps=4, **chosen)
    with pytest.raises(UsageError, match="optimiser: got momentum, expected nesterov for strategy ddc-asgd"):
        mpiddl.train("mlp", "digits", **again | {"out": tmp_path / "chosen", "max_steps": 8})


class WithAdam(Strategy):
    """Trains alone, with Adam."""

    optimisers = ("adam",)


def test_moments_of_another_optimiser_start_anew(tmp_path):
    job = {**QUICK, "out": tmp_path, "rate": 0.01}
    mpiddl.train("mlp", "digits", max_steps=4, **job)
    assert mpiddl.train("mlp", "digits", strategy=WithAdam(), max_steps=8, resume=True, **job).summary["steps"] == 8


def test_two_runs_in_one_folder(tmp_path):
    folder = Folder(tmp_path)
    folder.prepare(resume=False, overwrite=False)
    with pytest.raises(UsageError, match="another run is writing to it"):
        mpiddl.train("mlp", "digits", out=tmp_path, **QUICK)
    folder.release()
    mpiddl.train("mlp", "digits", out=tmp_path, **QUICK)


def test_what_a_killed_run_left_is_cleared(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".writing-step-00000006").write_text("a file in the way")
    (tmp_path / "checkpoints" / ".writing-step-00000001").mkdir()
    mpiddl.train("mlp", "digits", out=tmp_path, overwrite=True, max_steps=6, **QUICK)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000006"]


@pytest.mark.parametrize("content", [b"5", b"{}", b"\xff\xfe", b'{"step": "x"}'], ids=repr)
def test_damaged_metrics_do_not_stop_a_resume(tmp_path, content):
    mpiddl.train("mlp", "digits", out=tmp_path, max_steps=6, **QUICK)
    (tmp_path / "metrics.jsonl").write_bytes(content)
    mpiddl.train("mlp", "digits", out=tmp_path, resume=True, **QUICK)
    assert all(json.loads(line)["step"] > 6 for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


@pytest.mark.mpi(min_size=2)
def test_a_mistake_leaves_no_communicator_behind(comm):
    taken = [MPI.COMM_SELF.Dup() for _ in range(1800)]  # MPICH has 2,048 of them
    for _ in range(150):
        with pytest.raises(UsageError):
            mpiddl.train("mlp", "digits", comm=comm, epochs=-1)
    for one in taken:
        one.Free()


@pytest.mark.mpi(min_size=1)
def test_a_freed_communicator(comm):
    gone = comm.Dup()
    gone.Free()
    with pytest.raises(CommError, match="got a freed communicator"):
        mpiddl.train("mlp", "digits", comm=gone, **QUICK)


OUT_OF_RANGE = [({"shards": 10**9}, "shards: got 1000000000"), ({"rate": 10**400}, "rate: got a number of more than 300")]


@pytest.mark.parametrize(("settings", "message"), OUT_OF_RANGE, ids=["shards", "rate"])
def test_numbers_out_of_all_bounds(settings, message):
    with pytest.raises(UsageError, match=message):
        mpiddl.train("mlp", "digits", quiet=True, **settings)


def test_a_masked_array():
    with pytest.raises(UsageError, match="data: got a masked array"):
        mpiddl.train(Linear(), (np.ma.masked_less(X, 0), Y), **QUICK)
