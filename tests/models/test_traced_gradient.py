"""Who writes a gradient: in place, or by a copy, and where."""

from __future__ import annotations

import re

import numpy as np
import pytest
from harness.models import each_model, gradient_of, params_of, rows_for

from mpiddl.memory import FlatBuffer
from mpiddl.models.traced_gradient import trace

pytestmark = pytest.mark.no_mpi

HERE = r"test_traced_gradient\.py:\d+"


def traced(shape, compute):
    """The origin of one array, which ``compute(view)`` writes, and its values."""
    grad = FlatBuffer({"other": (5,), "w": shape, "last": (3,)}, "float64")
    found = trace(lambda views: compute(views["w"], views), grad)
    assert not (found["other"].copied or found["last"].copied)
    return found["w"], grad.views["w"]


def assign(view, views):
    view[:] = np.ones(4) + 1


def assign_through_another_name(view, views):
    row = view[:]
    row[...] = np.ones(4) * 2


def copyto(view, views):
    np.copyto(view, np.full(4, 2.0))


def assign_halves(view, views):
    view[:2], view[2:] = np.full(2, 2.0), np.full(2, 2.0)


def copyto_by_name(view, views):
    np.copyto(dst=view, src=np.full(4, 2.0))


def assign_flat(view, views):
    view.flat[:] = np.full(4, 2.0)


def replace_flat(view, views):
    view.flat = np.full(4, 2.0)


def put(view, views):
    np.put(view, [0, 1, 2, 3], np.full(4, 2.0))


def assign_by_lists(view, views):
    view[[0, 1]], view[[2, 3]] = np.full(2, 2.0), np.full(2, 2.0)


@pytest.mark.parametrize("compute", [assign, assign_through_another_name, copyto, assign_halves, copyto_by_name, assign_flat,
                                     replace_flat, put, assign_by_lists])
def test_copies(compute):
    origin, values = traced((4,), compute)
    assert (values == 2).all() and origin.copied == 32 and origin.written
    assert all(re.fullmatch(HERE, line) for line in (*origin.copies, *origin.made)) and origin.copies and origin.made


def by_out(view, views):
    np.add(np.ones(4), 1, out=view)


def by_matmul(view, views):
    np.matmul(np.eye(4), np.full(4, 2.0), out=view)


def by_sum(view, views):
    np.sum(np.ones((2, 4)), axis=0, out=view)


def by_dot(view, views):
    np.dot(np.eye(4), np.full(4, 2.0), out=view)


def by_augmented(view, views):
    view[:] = 1
    views["w"] += 1


def by_at(view, views):
    view[:] = 1
    np.add.at(view, [0, 1, 2, 3], 1)


def by_a_number(view, views):
    view[:] = 2.0


def by_itself(view, views):
    np.add(np.ones(4), 1, out=view)
    view[:] = view


@pytest.mark.parametrize("compute", [by_out, by_matmul, by_sum, by_dot, by_augmented, by_at, by_a_number, by_itself])
def test_in_place(compute):
    origin, values = traced((4,), compute)
    assert (values == 2).all() and origin.copied == 0 and origin.written
    assert origin.in_place and all(re.fullmatch(HERE, line) for line in origin.in_place)


def test_results_are_plain_arrays_and_what_is_not_written_is_said():
    seen = []
    origin, _ = traced((4,), lambda view, views: seen.append(type(np.exp(view) + view.copy())))
    assert seen == [np.ndarray] and not origin.written and not origin.in_place


@each_model
def test_our_models_write_in_place_and_compute_the_same(model):
    params, (x, y) = params_of(model), rows_for(model, 7)
    grad = FlatBuffer(model.shapes, "float64")
    found = trace(lambda views: model.gradient(params.views, x, y, views), grad)
    assert grad.flat.tobytes() == gradient_of(model, params, x, y)[1].tobytes()
    assert all(origin.written and not origin.copied for origin in found.values())
