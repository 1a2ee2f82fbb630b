"""What users of the Python API do wrong: one error, on every rank, that says what came and what was wanted."""

from __future__ import annotations

import numpy as np
import pytest

import mpiddl
from mpiddl.errors import ConvergenceError, MismatchError, MpiddlError, ShapeError, UsageError
from mpiddl.optim import SGD
from mpiddl.strategies import Strategy, chain, describe
from mpiddl.transport import virtual

X, Y = np.random.default_rng(0).standard_normal((60, 3)), np.arange(60.0)
QUICK = {"epochs": 2, "batch": 10, "quiet": True}


class Linear:
    """A model of a user's own, with one mistake at a time."""

    shapes = {"w": (3,)}  # noqa: RUF012

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


class Listed(Linear):
    shapes = [("w", (3,))]  # noqa: RUF012


class Partial(Linear):
    predict = property()


WRONG = [
    ((Rebinding(), (X, Y)), ShapeError, r"w: got another array in its place"),
    ((Returning(), (X, Y)), UsageError, r"model\.init: returned something"),
    ((Silent(), (X, Y)), UsageError, r"model\.gradient: returned NoneType"),
    ((Listed(), (X, Y)), UsageError, r"model\.shapes: got list"),
    ((Partial(), (X, Y)), UsageError, "without predict"),
    ((Linear, (X, Y)), UsageError, "got the class Linear, wanted an object of it"),
    ((Linear(), X), UsageError, "data: got ndarray, wanted"),
    ((Linear(), (X, Y, Y)), UsageError, "data: got 3 arrays"),
    (("mlp", 42), UsageError, "data: got int"),
    ((Linear(), (X, Y[:-1])), MpiddlError, "60"),
    ((Linear(), (X.astype(object), Y)), MpiddlError, "object"),
    ((Linear(), (X * np.nan, Y)), MpiddlError, "nan|finite"),
    (("mlp", (X, np.full(60, "label"))), MpiddlError, "U5|str"),
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


def test_a_strategy_that_is_none():
    with pytest.raises(UsageError, match="strategy: got int"):
        mpiddl.train(Linear(), (X, Y), strategy=3, **QUICK)


def test_test_rows_beside_a_named_data_set():
    with pytest.raises(UsageError, match="test: got test rows beside a named data set"):
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
        with pytest.raises(MismatchError, match="optimiser object: rank 0 was given 'SGD"):
            mpiddl.train(Linear(), (X, Y), comm=comm, optimiser=SGD(momentum=0.1 * comm.rank), **QUICK)

    virtual.run(2, program)


def test_replicas_that_differ_in_the_end_are_found():
    class Drifting(Strategy):
        def finish(self, comm, state, replica):
            replica.params += comm.rank

    with pytest.raises(MismatchError, match="differ from rank 0's"):
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
    assert "written by LocalSGD(period=8): from the one model in it" in capsys.readouterr().err
