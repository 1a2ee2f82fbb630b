"""Gradients as integers: the published formula, the error of half a unit, what is clipped, and sums in any order."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddl.coding.clip_quantisation import CACHED, add_quantised, dequantise, quantise
from mpiddl.errors import DataError, ShapeError, UsageError

pytestmark = pytest.mark.no_mpi

LARGEST = 2**31 - 1


def quantised(values, clip=10.0):
    out = np.full(len(values), 7, np.int32)
    return quantise(values, out, clip), out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("clip", [10.0, 0.1, 3.0, 1e-30, 1e30])
def test_the_bounds_do_not_overflow(dtype, clip):
    bound = dtype(clip)
    clipped, out = quantised(np.array([bound, -bound, 2 * bound, -2 * bound, 0], dtype), float(bound))
    assert out.tolist() == [LARGEST, -LARGEST, LARGEST, -LARGEST, 0] and clipped == 0.4


@given(st.lists(st.floats(-12, 12), max_size=50), st.sampled_from([10.0, 0.3, 7.77]))
def test_half_a_unit_off_at_most(values, clip):
    clipped, out = quantised(np.array(values), clip)
    assert clipped == (sum(abs(value) > clip for value in values) / len(values) if values else 0)
    for value, number in zip(values, out.tolist(), strict=True):
        within = Fraction(max(-clip, min(clip, value)))
        assert abs(within * LARGEST / Fraction(clip) - number) <= Fraction(1, 2) + Fraction(1, 10**6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_there_and_back(dtype):
    values = np.random.default_rng(0).uniform(-10, 10, 2 * CACHED + 3).astype(dtype)
    clipped, whole = quantised(values)
    back = np.empty_like(values)
    dequantise(whole, back)
    assert clipped == 0 and np.abs(back - values).max() <= 10 / 2**32 + 10 * np.finfo(dtype).eps / 2


def test_the_sum_has_64_bits_and_no_order():
    parts = np.random.default_rng(1).uniform(5, 10, (40, 100))
    whole = [quantised(part)[1] for part in parts]
    totals = np.zeros((2, 100), np.int64)
    for number in range(40):
        add_quantised(totals[0], whole[number])
        add_quantised(totals[1], whole[-1 - number])
    assert (totals[0] == totals[1]).all() and totals.min() > 2**32
    back = np.empty(100)
    dequantise(totals[0], back)
    assert np.abs(back - parts.sum(0)).max() < 40 * 10 / 2**32


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, CACHED + 5])
def test_what_is_not_finite_is_named(value, place):
    values = np.zeros(CACHED + 9, np.float32)
    values[place] = value
    with pytest.raises(DataError, match=f"gradient: got {value} at element {place}, expected finite numbers"):
        quantised(values)


@pytest.mark.parametrize("clip", [0.0, -1.0, np.nan, np.inf, 1e300])
def test_a_clip_bound_that_makes_no_sense(clip):
    with pytest.raises(UsageError, match=f"clip: got {clip}, expected a number > 0".replace("+", r"\+")):
        quantised(np.zeros(2), clip)
    with pytest.raises(UsageError, match="clip: got"):
        dequantise(np.zeros(2, np.int64), np.zeros(2), clip)


def test_arrays_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"quantised: got int64 of shape \(2,\) beside float64 of .* expected int32"):
        quantise(np.zeros(2), np.zeros(2, np.int64))
    with pytest.raises(ShapeError, match=r"quantised: got int32 of shape \(3,\)"):
        quantise(np.zeros(2), np.zeros(3, np.int32))
    with pytest.raises(ShapeError, match="expected int32 or int64"):
        dequantise(np.zeros(2, np.int16), np.zeros(2))
    with pytest.raises(UsageError, match="dtype: got"):
        quantise(np.zeros(2, np.float16), np.zeros(2, np.int32))
    with pytest.raises(ShapeError, match="total, quantised: got int32"):
        add_quantised(np.zeros(2, np.int32), np.zeros(2, np.int32))
