"""Optimisers against their formulas in numpy, schedules, clipping, and the refusal of bad numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from harness.kernel_calls import guarded, intact

from mpiddl.errors import ShapeError, UsageError
from mpiddl.memory import ALIGNMENT
from mpiddl.optim import SGD, Adam, AdamW, Constant, Cosine, Step, clip_norm, linear_scaling

pytestmark = pytest.mark.no_mpi

OPTIMISERS = [
    SGD(),
    SGD(weight_decay=0.1),
    SGD(momentum=0.9),
    SGD(momentum=0.8, weight_decay=0.1),
    SGD(momentum=0.9, nesterov=True, weight_decay=0.1),
    Adam(),
    Adam(beta1=0.7, beta2=0.9, eps=1e-3, weight_decay=0.1),
    AdamW(),
    AdamW(beta1=0.0, weight_decay=0.3),
]

each_optimiser = pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])


def gradients(n, steps=4):
    rng = np.random.default_rng(n)
    return rng.normal(size=n), rng.normal(size=(steps, n))


def by_formula(optimiser, p, grads, rate, scale):
    """The parameters after these gradients, in float64, as the papers write it."""
    v, m, s, decay = 0.0, 0.0, 0.0, optimiser.weight_decay
    for t, grad in enumerate(grads, 1):
        g = scale * grad
        if isinstance(optimiser, SGD):
            g = g + decay * p
            v = optimiser.momentum * v + g
            p = p - rate * (g + optimiser.momentum * v if optimiser.nesterov else v)
            continue
        if isinstance(optimiser, AdamW):
            p = p - rate * decay * p
        else:
            g = g + decay * p
        m = optimiser.beta1 * m + (1 - optimiser.beta1) * g
        s = optimiser.beta2 * s + (1 - optimiser.beta2) * g * g
        corrected = np.sqrt(s / (1 - optimiser.beta2**t)) + optimiser.eps
        p = p - rate * m / (1 - optimiser.beta1**t) / corrected
    return p


def by_update(optimiser, p, grads, rate, scale, dtype):
    """The same through `update`, all arrays between guard bytes."""
    params = guarded(p.astype(dtype))
    moments = {name: guarded(moment) for name, moment in optimiser.init(p.size, dtype).items()}
    for step, grad in enumerate(grads):
        grad = guarded(grad.astype(dtype))
        before = grad.copy()
        optimiser.update(params, grad, moments, rate, scale, step)
        assert np.array_equal(grad, before)
        assert intact(params, grad, *moments.values())
    return params


@each_dtype
@each_optimiser
@pytest.mark.parametrize("n", [0, 1, 2, 7, 16, 31, 33, 257])
def test_updates_follow_the_formula(n, optimiser, dtype):
    p, grads = gradients(n)
    found = by_update(optimiser, p, grads, 0.05, 0.25, dtype)
    wanted = by_formula(optimiser, p, grads, 0.05, 0.25)
    tolerance = 200 * np.finfo(dtype).eps
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


@each_dtype
@each_optimiser
def test_slices_updated_apart_have_the_bits_of_the_whole(optimiser, dtype):
    p, grads = gradients(100)
    params, moments = p.astype(dtype), optimiser.init(100, dtype)
    for step, grad in enumerate(grads.astype(dtype)):
        for part in (slice(0, 37), slice(37, 37), slice(37, 100)):
            share = {name: moment[part] for name, moment in moments.items()}
            optimiser.update(params[part], grad[part], share, 0.05, 0.25, step)
    assert np.array_equal(params, by_update(optimiser, p, grads, 0.05, 0.25, dtype))


@each_dtype
@pytest.mark.parametrize(
    ("optimiser", "names"),
    [(SGD(), []), (SGD(0.9), ["velocity"]), (Adam(), ["mean", "square"]), (AdamW(), ["mean", "square"])],
    ids=str,
)
def test_moments_are_flat_zeroed_aligned_arrays_of_the_dtype_of_the_parameters(optimiser, names, dtype):
    moments = optimiser.init(5, dtype)
    assert list(moments) == names
    for moment in moments.values():
        assert (moment.shape, moment.dtype, moment.any()) == ((5,), np.dtype(dtype), False)
        assert moment.ctypes.data % ALIGNMENT == 0


@each_dtype
@each_optimiser
def test_moments_that_shrink_become_zero_before_they_become_subnormal(optimiser, dtype):
    least = np.finfo(dtype).tiny
    moments = {name: np.full(3, 1.0625 * least, dtype) for name in optimiser.init(3, dtype)}
    params, grad = np.zeros(3, dtype), np.zeros(3, dtype)
    for step in range(200):
        optimiser.update(params, grad, moments, 0.01, 1.0, step)
    for moment in moments.values():
        assert ((moment == 0) | (moment >= least)).all()


@pytest.mark.parametrize("optimiser", [SGD(), SGD(0.9), Adam()], ids=str)
def test_a_gradient_that_is_not_finite_is_not_hidden(optimiser):
    params = np.ones(3)
    optimiser.update(params, np.array([1.0, np.nan, 1.0]), optimiser.init(3, "float64"), 0.1)
    assert np.isfinite(params).tolist() == [True, False, True]


@pytest.mark.parametrize("grad", [np.zeros(4), np.zeros(3, np.float32), np.zeros((3, 1))])
def test_a_gradient_that_does_not_fit_is_refused(grad):
    with pytest.raises(ShapeError, match=r"^grad: .*expected .*\(3,\)"):
        SGD().update(np.zeros(3), grad, {}, 0.1)


def test_moments_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match=r"^moments\[0\]: .*expected .*\(3,\)"):
        SGD(0.9).update(np.zeros(3), np.zeros(3), {"velocity": np.zeros(4)}, 0.1)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: SGD(momentum=1.0), "momentum"),
        (lambda: SGD(momentum=-0.1), "momentum"),
        (lambda: SGD(momentum="0.9"), "momentum"),
        (lambda: SGD(nesterov=True), "nesterov"),
        (lambda: SGD(weight_decay=-1), "weight_decay"),
        (lambda: Adam(beta1=1.0), "beta1"),
        (lambda: Adam(beta2=-0.5), "beta2"),
        (lambda: Adam(eps=-1e-8), "eps"),
        (lambda: AdamW(weight_decay=float("nan")), "weight_decay"),
        (lambda: Constant(-0.1), "rate"),
        (lambda: Constant(float("inf")), "rate"),
        (lambda: Constant(0.1, warmup=-1), "warmup"),
        (lambda: Step(0.1, every=0), "every"),
        (lambda: Step(0.1, every=5, factor=-1), "factor"),
        (lambda: Cosine(0.1, steps=0), "steps"),
        (lambda: Cosine(0.1, steps=5, warmup=5), "steps"),
        (lambda: Cosine(0.1, steps=5, final=-1), "final"),
        (lambda: linear_scaling(-1, 4, 2), "rate"),
        (lambda: linear_scaling(0.1, 0, 2), "batch"),
        (lambda: linear_scaling(0.1, 4, 0), "reference"),
        (lambda: clip_norm(np.ones(2), 1.0, 0.0), "max_norm"),
        (lambda: clip_norm(np.ones(2), 1.0, float("nan")), "max_norm"),
    ],
)
def test_numbers_outside_their_range_are_refused_by_name(make, argument):
    with pytest.raises(UsageError, match=f"^{argument}: .* expected"):
        make()


@pytest.mark.parametrize("step", [0, 0.5, 3, 10**6])
def test_a_constant_rate_stays(step):
    assert Constant(0.3)(step) == 0.3


def test_steps_multiply_the_rate_by_the_factor():
    rate = Step(0.8, every=3, factor=0.5)
    assert [rate(step) for step in range(8)] == [0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.2, 0.2]
    assert rate(2.9) == 0.8


def test_a_cosine_falls_from_the_rate_to_the_final_one_and_stays_there():
    rate = Cosine(1.0, steps=8, final=0.2)
    wanted = [0.2 + 0.8 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(9)]
    assert [rate(step) for step in range(9)] == pytest.approx(wanted, rel=1e-14)
    assert (rate(0), rate(8), rate(100)) == pytest.approx((1.0, 0.2, 0.2))


@pytest.mark.parametrize(
    "schedule", [Constant(1.0, warmup=4), Step(1.0, every=100, warmup=4), Cosine(1.0, 100, warmup=4)], ids=str
)
def test_the_warm_up_is_linear_and_ends_at_the_full_rate(schedule):
    assert [schedule(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_cosine_begins_behind_the_warm_up():
    late, plain = Cosine(1.0, steps=14, warmup=4), Cosine(1.0, steps=10)
    assert [late(step + 4) for step in range(11)] == [plain(step) for step in range(11)]


def test_linear_scaling_is_proportional_to_the_batch():
    assert linear_scaling(0.1, batch=64, reference=256) == 0.025


@each_dtype
def test_clipping_scales_a_long_gradient_down_to_the_norm_allowed(dtype):
    grad = np.random.default_rng(0).normal(size=101).astype(dtype)
    before = grad.copy()
    norm = 0.5 * np.linalg.norm(grad.astype(np.float64))
    scale, found = clip_norm(grad, 0.5, max_norm=2.0)
    assert found == pytest.approx(norm, rel=1e-13)
    assert scale * np.linalg.norm(grad.astype(np.float64)) == pytest.approx(2.0, rel=1e-6)
    assert np.array_equal(grad, before)


@pytest.mark.parametrize("grad", [np.zeros(0), np.zeros(5), np.array([0.3, 0.4])])
def test_clipping_leaves_a_short_gradient_alone(grad):
    assert clip_norm(grad, 2.0, max_norm=1.5) == (2.0, pytest.approx(2 * np.linalg.norm(grad)))


def test_the_norm_of_large_float32_numbers_does_not_overflow():
    assert clip_norm(np.full(4, 1e30, np.float32), 1.0, 1.0)[1] == pytest.approx(2e30, rel=1e-6)
