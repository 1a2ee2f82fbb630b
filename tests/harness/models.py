"""The models, small, with rows for them."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddl.memory import FlatBuffer
from mpiddl.models import MLP, Score, Softmax

MODELS = [
    Softmax(5, 3),
    MLP((4, 1), loss="squared-error"),
    MLP((7, 16, 3)),
    MLP((6, 9, 17, 4), activation="tanh"),
    MLP((3, 33, 5), activation="tanh", loss="squared-error", initialisation="glorot"),
    MLP((20, 31, 15, 7, 2), loss="squared-error"),
]
each_model = pytest.mark.parametrize("model", MODELS, ids=str)


def rows_for(model, n, dtype="float64", seed=0):
    rng = np.random.default_rng([seed, n])
    x = rng.normal(size=(n, model.sizes[0])).astype(dtype)
    if model.loss == "cross-entropy":
        return x, rng.integers(0, model.sizes[-1], n)
    return x, rng.normal(size=(n, model.sizes[-1])).astype(dtype)


def params_of(model, dtype="float64"):
    """Parameters with biases that are not zero."""
    rng, buffer = np.random.default_rng(1), FlatBuffer(model.shapes, dtype)
    model.init(buffer.views, rng)
    buffer.flat += rng.normal(0, 0.1, buffer.flat.shape).astype(dtype)
    return buffer


def gradient_of(model, params, x, y, **keywords):
    """(what `gradient` returned, the flat gradient), written over NaN."""
    grad = FlatBuffer(model.shapes, params.dtype)
    grad.flat[:] = np.nan
    return model.gradient(params.views, x, y, grad.views, **keywords), grad.flat


def loss_of(result):
    return result.loss if isinstance(result, Score) else result
