"""An optimiser of PyTorch as a function of flat arrays."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mpiddl.torch.flat_update import FlatUpdate  # noqa: E402

pytestmark = pytest.mark.no_mpi


@pytest.mark.parametrize(("name", "options", "proportional"), [
    ("SGD", {}, True), ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, True), ("Adam", {}, False),
    ("AdamW", {}, False), ("Adadelta", {}, False), ("Adagrad", {}, False), ("RMSprop", {}, False), ("Rprop", {}, False),
])
def test_an_adaptive_optimiser_is_known_by_its_steps(name, options, proportional):
    optimiser = getattr(torch.optim, name)([torch.ones(3, requires_grad=True)], lr=0.1, **options)
    update = FlatUpdate(optimiser, lambda: optimiser.param_groups[0], torch.float32)
    assert update.proportional() is proportional
    assert update.elementwise()
    assert len(optimiser.state) == (name == "Adagrad")  # which makes it early


def test_an_optimiser_that_is_gone_still_updates():
    tensor = torch.ones(3, requires_grad=True)
    optimiser = torch.optim.SGD([tensor], lr=0.5, momentum=0.9)
    group = optimiser.param_groups[0]
    update = FlatUpdate(optimiser, lambda: group, torch.float32)
    del optimiser
    params, moments = tensor.detach().numpy(), {"momentum_buffer": torch.zeros(3).numpy()}
    for step in range(2):
        update(params, torch.ones(3).numpy(), moments, 0.5, step=step)
    assert params.tolist() == pytest.approx([1 - 0.5 - 0.5 * 1.9] * 3)
