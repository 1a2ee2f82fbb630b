"""Models against torch, the independent implementation."""

from __future__ import annotations

import numpy as np
import pytest
from harness.models import MODELS, each_model, gradient_of, loss_of, params_of, rows_for

from mpiddl.optim import SGD, Adam, AdamW

pytestmark = pytest.mark.no_mpi


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="torch, the independent implementation, is not installed")


def network(torch, model, params):
    """The same network in torch: (its function, its weights as leaves in the order of the flat buffer)."""
    leaves = [torch.tensor(part, requires_grad=True) for part in params.views.values()]

    def outputs(x):
        for layer in range(0, len(leaves), 2):
            x = x @ leaves[layer] + leaves[layer + 1]
            if layer + 2 < len(leaves):
                x = getattr(torch, model.activation)(x)
        return x

    return outputs, leaves


def torch_loss(torch, model, outputs, y):
    if model.loss == "squared-error":
        return torch.nn.functional.mse_loss(outputs, torch.tensor(y), reduction="sum") / 2
    return torch.nn.functional.cross_entropy(outputs, torch.tensor(y), reduction="sum")


def flat(tensors):
    return np.concatenate([tensor.detach().numpy().ravel() for tensor in tensors])


@each_model
def test_loss_and_gradient_are_those_of_torch(torch, model):
    (x, y), params = rows_for(model, 33), params_of(model)
    result, grad = gradient_of(model, params, x, y)
    outputs, leaves = network(torch, model, params)
    loss = torch_loss(torch, model, outputs(torch.tensor(x)), y)
    loss.backward()
    wanted = flat(leaf.grad for leaf in leaves)
    assert loss_of(result) == pytest.approx(loss.item(), rel=1e-12)
    np.testing.assert_allclose(grad, wanted, rtol=1e-10, atol=1e-12 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("optimiser", "name", "settings"),
    [
        (SGD(), "SGD", {}),
        (SGD(weight_decay=0.1), "SGD", {"weight_decay": 0.1}),
        (SGD(0.9, weight_decay=0.1), "SGD", {"momentum": 0.9, "weight_decay": 0.1}),
        (SGD(0.9, nesterov=True, weight_decay=0.1), "SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (Adam(weight_decay=0.1), "Adam", {"weight_decay": 0.1}),
        (AdamW(0.8, 0.99, weight_decay=0.1), "AdamW", {"betas": (0.8, 0.99), "weight_decay": 0.1}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize("model", MODELS[::3], ids=str)
def test_weights_after_five_steps_are_those_of_torch(torch, model, optimiser, name, settings):
    (x, y), params = rows_for(model, 16), params_of(model)
    outputs, leaves = network(torch, model, params)
    theirs = getattr(torch.optim, name)(leaves, lr=0.05, **settings)
    moments = optimiser.init(params.flat.size, "float64")
    for step in range(5):
        theirs.zero_grad()
        (torch_loss(torch, model, outputs(torch.tensor(x)), y) / len(x)).backward()
        theirs.step()
        _, grad = gradient_of(model, params, x, y)
        optimiser.update(params.flat, grad, moments, 0.05, 1 / len(x), step)
    np.testing.assert_allclose(params.flat, flat(leaves), rtol=1e-9, atol=1e-10)
