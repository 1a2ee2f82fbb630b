"""Models against finite differences, numpy and torch, and the promises of the model protocol."""

from __future__ import annotations

import re
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from harness.models import each_model, gradient_of, loss_of, params_of, rows_for

import mpiddl
from mpiddl.errors import DataError, ShapeError, UsageError
from mpiddl.memory import FlatBuffer
from mpiddl.models import MLP, Score, Softmax, gradcheck

pytestmark = pytest.mark.no_mpi

each_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])


def by_formula(model, params, x, y):
    """Loss and flat gradient as the textbook writes them."""
    views, depth = params.views, len(model.sizes) - 1
    layers = [x]
    for layer in range(1, depth + 1):
        z = layers[-1] @ views[f"weight{layer}"] + views[f"bias{layer}"]
        layers.append(z if layer == depth else np.maximum(z, 0) if model.activation == "relu" else np.tanh(z))
    if model.loss == "squared-error":
        delta = layers[-1] - y
        loss = (delta**2).sum() / 2
    else:
        shares = np.exp(layers[-1])
        shares /= shares.sum(1, keepdims=True)
        loss = -np.log(shares[np.arange(len(y)), y]).sum()
        delta = shares - np.eye(model.sizes[-1])[y]
    parts = []
    for layer in range(depth, 0, -1):
        h = layers[layer - 1]
        parts[:0] = [(h.T @ delta).ravel(), delta.sum(0)]
        delta = delta @ views[f"weight{layer}"].T * ((h > 0) if model.activation == "relu" else 1 - h**2)
    return loss, np.concatenate(parts)


@each_model
@pytest.mark.parametrize("n", [1, 2, 17])
def test_loss_and_gradient_are_those_of_the_formula(model, n):
    (x, y), params = rows_for(model, n), params_of(model)
    result, grad = gradient_of(model, params, x, y)
    loss, wanted = by_formula(model, params, x, y)
    assert loss_of(result) == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(grad, wanted, rtol=1e-10, atol=1e-12 * np.abs(wanted).max())


@each_model
def test_float32_follows_float64_to_its_own_rounding(model):
    (x, y), params = rows_for(model, 17, "float32"), params_of(model, "float32")
    result, grad = gradient_of(model, params, x, y)
    double = FlatBuffer(model.shapes, "float64", flat=params.flat.astype(np.float64))
    loss, wanted = by_formula(model, double, x.astype(np.float64), y)
    assert loss_of(result) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@each_model
def test_the_gradient_is_that_of_finite_differences(model):
    report = gradcheck(model, *rows_for(model, 6))
    assert report, report
    assert [array.name for array in report.arrays] == list(model.shapes)


class Planted(MLP):
    """A network whose gradient is wrong in one element."""

    def gradient(self, params, x, y, grad):
        score = super().gradient(params, x, y, grad)
        grad["weight2"][1, 2] *= 1.001
        return score


class Mean(MLP):
    """Divides by the number of rows."""

    def gradient(self, params, x, y, grad):
        score = super().gradient(params, x, y, grad)
        for part in grad.values():
            part /= max(len(x), 1)
        return Score(score.loss / max(len(x), 1), score.correct)


class Twice(MLP):
    """Announces the last layer twice."""

    def gradient(self, params, x, y, grad, *, ready=lambda part: None):
        score = super().gradient(params, x, y, grad, ready=ready)
        ready(self._parts[-1])
        return score


class Early(MLP):
    """Announces everything before it is there."""

    def gradient(self, params, x, y, grad, *, ready=lambda part: None):
        for part in self._parts:
            ready(part)
        return super().gradient(params, x, y, grad)


class Lazy(MLP):
    """Leaves the gradient alone, and announces nothing, when there are no rows."""

    def gradient(self, params, x, y, grad, *, ready=lambda part: None):
        return super().gradient(params, x, y, grad, ready=ready) if len(x) else Score(0.0, 0)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (Planted, "weight2 .*WRONG"),
        (Mean, "expected a sum over the rows"),
        (Twice, "is announced 2 times, not once"),
        (Early, "announced before it is final"),
        (Lazy, "no rows must give gradient zero"),
        (Lazy, "no rows are announced in another order"),
    ],
)
def test_gradcheck_finds_what_is_wrong_and_tells_it(wrong, told):
    model = wrong((4, 3, 3))
    report = gradcheck(model, *rows_for(model, 6))
    assert not report
    assert re.search(told, str(report))


@each_model
@pytest.mark.parametrize("n", [0, 1, 9])
def test_every_element_is_announced_once_last_layer_first_and_when_final(model, n):
    (x, y), params = rows_for(model, n), params_of(model)
    _, wanted = gradient_of(model, params, x, y)
    grad, heard = FlatBuffer(model.shapes, "float64"), []
    grad.flat[:] = np.nan

    def ready(part):
        heard.append(part)
        assert np.array_equal(grad.flat[part], wanted[part])

    model.gradient(params.views, x, y, grad.views, ready=ready)
    layers = [grad.slice(f"bias{layer}").stop for layer in range(1, len(model.sizes))]
    assert heard == [slice(*edges) for edges in pairwise([0, *layers])][::-1]


@each_dtype
@each_model
def test_no_rows_give_gradient_zero_and_loss_zero(model, dtype):
    (x, y), params = rows_for(model, 0, dtype), params_of(model, dtype)
    result, grad = gradient_of(model, params, x, y)
    assert np.array_equal(grad, np.zeros(grad.size))
    assert loss_of(result) == 0
    assert model.predict(params.views, x).shape == (0, model.sizes[-1])
    assert model.score(params.views, x, y) == Score(0.0, 0 if model.loss == "cross-entropy" else None)


@each_model
@pytest.mark.parametrize("cuts", [(0, 1, 20), (0, 7, 7, 20), (0, 20)])
def test_gradients_losses_and_hits_of_parts_add_up_to_those_of_all_rows(model, cuts):
    (x, y), params = rows_for(model, 20), params_of(model)
    whole, wanted = gradient_of(model, params, x, y)
    parts = [gradient_of(model, params, x[a:b], y[a:b]) for a, b in pairwise(cuts)]
    np.testing.assert_allclose(sum(grad for _, grad in parts), wanted, rtol=1e-11, atol=1e-12 * np.abs(wanted).max())
    assert sum(loss_of(result) for result, _ in parts) == pytest.approx(loss_of(whole), rel=1e-13)
    if model.loss == "cross-entropy":
        assert sum(result.correct for result, _ in parts) == whole.correct


@each_dtype
@each_model
@pytest.mark.parametrize("n", [5, 600])
def test_predict_and_score_agree_with_the_gradient(model, n, dtype):
    (x, y), params = rows_for(model, n, dtype), params_of(model, dtype)
    result, _ = gradient_of(model, params, x, y)
    score, outputs = model.score(params.views, x, y), model.predict(params.views, x)
    assert score.loss == pytest.approx(loss_of(result), rel=1e-12)
    if model.loss == "cross-entropy":
        assert score.correct == result.correct == (outputs.argmax(1) == y).sum()
    else:
        assert score.correct is None
        assert score.loss == pytest.approx(((outputs.astype(np.float64) - y) ** 2).sum() / 2, rel=1e-5)


@each_model
def test_a_used_workspace_changes_no_bit(model):
    params, work = params_of(model), model.workspace(40, "float64")
    gradient_of(model, params, *rows_for(model, 40, seed=2), work=work)
    x, y = rows_for(model, 13)
    (fresh, wanted), (reused, found) = gradient_of(model, params, x, y), gradient_of(model, params, x, y, work=work)
    assert np.array_equal(found, wanted)
    assert reused == fresh


def test_a_step_with_a_workspace_allocates_no_arrays():
    model = MLP((100, 200, 10))
    (x, y), params, grad = rows_for(model, 64), params_of(model), FlatBuffer(model.shapes, "float64")
    work = model.workspace(64, "float64")
    model.gradient(params.views, x, y, grad.views, work=work)
    tracemalloc.start()
    model.gradient(params.views, x, y, grad.views, work=work)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 10 * 8


@each_dtype
@pytest.mark.parametrize("sizes", [(300, 300, 10), (24, 3000, 3)])  # the second has fewer inputs than a thread's share
def test_threads_change_no_bit(sizes, dtype):
    one, two = MLP(sizes), MLP(sizes, threads=2)
    (x, y), params = rows_for(one, 64, dtype), params_of(one, dtype)
    score, grad = gradient_of(one, params, x, y)
    work = two.workspace(64, dtype)
    for _ in range(5):
        shared_score, shared = gradient_of(two, params, x, y, work=work)
        assert shared_score == score
        assert np.array_equal(shared, grad)


@pytest.mark.parametrize("change", [np.asfortranarray, lambda a: np.repeat(a, 2, 0)[::2], lambda a: a.astype(np.float32)])
def test_rows_in_any_order_of_memory_and_precision_are_taken(change):
    model = MLP((7, 16, 3))
    (x, y), params = rows_for(model, 9, "float32"), params_of(model)
    x = x.astype(np.float64)
    result, wanted = gradient_of(model, params, x, y)
    x, y = change(x), y.astype(np.uint8)
    x.flags.writeable = y.flags.writeable = False
    found, grad = gradient_of(model, params, x, y)
    assert (found, grad.tolist()) == (result, wanted.tolist())


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_an_input_that_is_not_a_number_shows_in_the_gradient(activation):
    model = MLP((7, 16, 3), activation)
    (x, y), params = rows_for(model, 4), params_of(model)
    x[2, 3] = np.nan
    assert np.isnan(gradient_of(model, params, x, y)[1]).any()


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_weights_that_are_not_numbers_show_in_the_loss(activation):
    model = MLP((7, 16, 3), activation)
    (x, y), params = rows_for(model, 4), params_of(model)
    params.views["weight1"][:] = np.nan
    assert np.isnan(loss_of(gradient_of(model, params, x, y)[0]))


@pytest.mark.parametrize("label", [-1, 3, 2**40])
@pytest.mark.parametrize("row", [0, 8])
def test_a_label_out_of_range_is_refused_with_its_row(row, label):
    model = MLP((7, 16, 3))
    (x, y), params = rows_for(model, 9), params_of(model)
    y[row] = label
    for call in (gradient_of, lambda model, params, x, y: model.score(params.views, x, y)):
        with pytest.raises(DataError, match=f"^y, row {row}: got label {label}, expected 0 to 2"):
            call(model, params, x, y)


def test_score_names_a_bad_label_by_its_row_among_all_rows():
    model = Softmax(5, 3)
    (x, y), params = rows_for(model, 600), params_of(model)
    y[570] = 7
    with pytest.raises(DataError, match=r"^y, row 570: got label 7"):
        model.score(params.views, x, y)


@pytest.mark.parametrize(
    ("x", "y", "told"),
    [
        (np.zeros((4, 6)), np.zeros(4, int), r"^x: got shape \(4, 6\), expected \(rows, 7\)"),
        (np.zeros(7), np.zeros(1, int), r"^x: got shape \(7,\)"),
        (np.zeros((4, 7), np.uint8), np.zeros(4, int), r"^x: got uint8.*/ 255"),
        (np.zeros((4, 7)), np.zeros(3, int), r"^y: .*expected .*\(4,\)"),
        (np.zeros((4, 7)), np.zeros(4), r"^y: got float64 .* integers"),
        (np.zeros((4, 7)), np.zeros((4, 1), int), r"^y: .*expected .*\(4,\)"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(x, y, told):
    model = MLP((7, 16, 3))
    with pytest.raises(ShapeError, match=told):
        gradient_of(model, params_of(model), x, y)


def test_targets_that_do_not_fit_are_refused_and_one_column_may_come_flat():
    model = MLP((4, 2), loss="squared-error")
    with pytest.raises(ShapeError, match=r"^y: got shape \(3, 1\), expected \(3, 2\)"):
        gradient_of(model, params_of(model), np.zeros((3, 4)), np.zeros((3, 1)))
    model = MLP((4, 1), loss="squared-error")
    (x, y), params = rows_for(model, 5), params_of(model)
    column, flat = gradient_of(model, params, x, y), gradient_of(model, params, x, y[:, 0])
    assert (column[0], column[1].tolist()) == (flat[0], flat[1].tolist())


def test_more_rows_than_the_workspace_has_are_refused():
    model = Softmax(5, 3)
    with pytest.raises(ShapeError, match=r"^x: got 6 rows, expected at most 5"):
        gradient_of(model, params_of(model), *rows_for(model, 6), work=model.workspace(5, "float64"))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"sizes": (5,)}, "sizes"),
        ({"sizes": (5, 0, 2)}, "sizes"),
        ({"sizes": (5, 2.0)}, "sizes"),
        ({"sizes": 5}, "sizes"),
        ({"sizes": (5, 2), "activation": "sine"}, "activation"),
        ({"sizes": (5, 2), "loss": "hinge"}, "loss"),
        ({"sizes": (5, 2), "initialisation": "zero"}, "initialisation"),
        ({"sizes": (5, 2), "threads": 0}, "threads"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, name):
    with pytest.raises(UsageError, match=f"^{name}: .* expected"):
        MLP(**arguments)


@pytest.mark.parametrize("initialisation", ["he", "glorot"])
def test_initial_weights_have_the_variance_that_was_promised(initialisation):
    buffer = FlatBuffer({"weight1": (400, 300), "bias1": (300,)}, "float64")
    buffer.flat[:] = np.nan
    MLP((400, 300), initialisation=initialisation).init(buffer.views, np.random.default_rng(0))
    weight = buffer.views["weight1"]
    variance = {"he": 2 / 400, "glorot": 2 / (400 + 300)}[initialisation]
    assert weight.mean() == pytest.approx(0, abs=5 * np.sqrt(variance / weight.size))
    assert weight.var() == pytest.approx(variance, rel=0.02)
    fourth = {"he": 3, "glorot": 9 / 5}[initialisation]
    assert (weight**4).mean() / weight.var() ** 2 == pytest.approx(fourth, rel=0.03)
    assert not buffer.views["bias1"].any()


@each_model
def test_initial_weights_depend_on_the_generator_alone(model):
    buffers = [FlatBuffer(model.shapes, dtype) for dtype in ("float64", "float64", "float32")]
    for buffer in buffers:
        model.init(buffer.views, np.random.default_rng(5))
    assert np.array_equal(buffers[0].flat, buffers[1].flat)
    assert np.array_equal(buffers[0].flat.astype(np.float32), buffers[2].flat)


def test_scores_of_numpys_numbers_are_kept_in_a_run_folder(tmp_path):
    class Numpys(MLP):
        def gradient(self, *arguments, **more):
            score = super().gradient(*arguments, **more)
            return Score(np.float32(score.loss), np.int64(score.correct))

    result = mpiddl.train(Numpys((64, 4, 10)), "digits", out=tmp_path, epochs=1, quiet=True)
    assert result.history[0]["loss"] > 0 and (tmp_path / "summary.json").exists()
