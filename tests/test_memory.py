"""Flat buffers: aligned, tight, and written through their views, which cannot be rebound."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from mpiddl.errors import ShapeError, UsageError
from mpiddl.memory import ALIGNMENT, FlatBuffer, aligned_zeros, slices

pytestmark = pytest.mark.no_mpi

SHAPES = {"weight": (3, 5), "none": (0, 4), "bias": (5,), "scale": ()}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 7, 16, 17, 1000])
def test_arrays_begin_on_a_cache_line_and_are_zero(size, dtype):
    for _ in range(5):
        array = aligned_zeros(size, dtype)
        assert array.ctypes.data % ALIGNMENT == 0
        assert (array.shape, array.dtype, array.any()) == ((size,), np.dtype(dtype), False)


@pytest.mark.parametrize("size", [1, 7, 16, 17])
def test_the_last_cache_line_belongs_to_the_array_alone(size):
    array = aligned_zeros(size, np.float32)
    last_line_ends = -(-(array.ctypes.data + array.nbytes) // ALIGNMENT) * ALIGNMENT
    assert last_line_ends <= array.base.ctypes.data + array.base.nbytes


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_views_lie_tightly_in_the_order_of_the_shapes(dtype):
    buffer = FlatBuffer(SHAPES, dtype)
    assert buffer.flat.shape == (21,)
    assert buffer.dtype == buffer.flat.dtype == np.dtype(dtype)
    assert list(buffer.views) == list(SHAPES)
    assert slices(SHAPES) == buffer.slices
    buffer.flat[:] = np.arange(21)
    for name, shape in SHAPES.items():
        assert buffer.views[name].shape == shape
        assert buffer.views[name].flags.c_contiguous
        assert np.array_equal(buffer.views[name].ravel(), buffer.flat[buffer.slice(name)])
    assert [(part.start, part.stop) for part in buffer.slices.values()] == [(0, 15), (15, 15), (15, 20), (20, 21)]


def test_views_share_memory_with_the_flat_array():
    buffer = FlatBuffer(SHAPES, "float64")
    buffer.views["bias"][:] = 7
    buffer.views["scale"][...] = 9
    assert buffer.flat.tolist() == [0] * 15 + [7] * 5 + [9]
    assert np.shares_memory(buffer.views["weight"], buffer.flat)


def test_views_lie_over_given_memory_without_a_copy():
    memory = np.arange(21.0)
    buffer = FlatBuffer(SHAPES, "float64", flat=memory)
    assert buffer.flat is memory
    buffer.views["weight"][0, 0] = -1
    assert memory[0] == -1


def test_no_shapes_make_an_empty_buffer():
    buffer = FlatBuffer({}, "float32")
    assert (buffer.flat.shape, buffer.views) == ((0,), {})


def test_views_are_changed_in_place():
    buffer = FlatBuffer(SHAPES, "float64")
    buffer.views["bias"] += 1
    buffer.views["bias"] *= 3
    buffer.views["bias"][1:3] = 5
    assert buffer.flat[15:20].tolist() == [3, 5, 5, 3, 3]


@pytest.mark.parametrize("name", ["bias", "another"])
def test_another_array_in_the_place_of_a_view_is_refused(name):
    buffer = FlatBuffer(SHAPES, "float64")
    with pytest.raises(ShapeError, match=rf"{name}: got another array, .*params\['{name}'\]\[:\]"):
        buffer.views[name] = np.ones(5)
    assert list(buffer.views) == list(SHAPES)
    assert not buffer.flat.any()


@pytest.mark.parametrize("shape", [5, [5], (5, -1), (5.0,), ("5",), None])
def test_shapes_that_are_none_are_refused(shape):
    with pytest.raises(ShapeError, match=r"shapes: got .* for 'w', expected a tuple of integers"):
        FlatBuffer({"w": shape}, "float32")


@pytest.mark.parametrize("dtype", ["float16", "int64", "complex128", "nonsense", object])
def test_dtypes_other_than_the_two_are_refused(dtype):
    with pytest.raises(UsageError, match=r"dtype: .* 'float32' or 'float64'"):
        FlatBuffer(SHAPES, dtype)


@pytest.mark.parametrize(
    "flat", [np.zeros(20), np.zeros(22), np.zeros((21, 1)), np.zeros(21, np.float32), np.zeros(42)[::2]]
)
def test_memory_that_does_not_fit_is_refused(flat):
    with pytest.raises(ShapeError, match=r"^flat: .*\(21,\)"):
        FlatBuffer(SHAPES, "float64", flat=flat)


def test_a_part_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ShapeError, match="got 'weigth', expected the name of a part: weight, none, bias, scale"):
        FlatBuffer(SHAPES, "float32").slice("weigth")


def test_views_are_not_rebound_by_update_either():
    buffer = FlatBuffer({"w": (3,)}, "float64")
    with pytest.raises(ShapeError, match="w: got another array"):
        buffer.views.update(w=np.ones(3))
    with pytest.raises(ShapeError, match="w: got another array"):
        buffer.views |= {"w": np.ones(3)}
    assert not buffer.flat.any()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda views: pickle.loads(pickle.dumps(views))])
def test_a_copy_of_views_is_a_plain_dict(copied):
    buffer = FlatBuffer({"w": (3,)}, "float64")
    best = copied(buffer.views)
    assert type(best) is dict and best["w"].tolist() == [0, 0, 0]
