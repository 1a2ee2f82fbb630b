"""Gradients that are sent during the backward pass: the steps of one rank, whatever the pass does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mpiddl.errors import MismatchError  # noqa: E402
from mpiddl.strategies.synchronous.auto import Auto  # noqa: E402
from mpiddl.strategies.synchronous.ring import Ring  # noqa: E402
from mpiddl.torch.coordinator import Coordinator  # noqa: E402

CALLS: list[tuple[str, int]] = []


class Noted(Auto):
    """Notes which parts are final, from where on."""

    def start(self, comm, state, grad, part, step):
        CALLS.append(("final", part.start))
        return super().start(comm, state, grad, part, step)


@pytest.fixture
def coordinated(link):
    """``coordinated(strategy, *tensors)``: a coordinator of an optimiser of ``tensors``."""
    made, optimisers = [], []

    def make(strategy, *tensors):
        made.append(Coordinator(link.Dup(), strategy))
        optimisers.append(torch.optim.SGD(tensors, lr=1.0))
        made[-1].add(optimisers[-1])
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.finish()
        for parameters in each.sets:
            parameters.free()


def weights(*values):
    return [torch.full((5,), value, requires_grad=True) for value in values]


@pytest.mark.mpi(min_size=2)
def test_the_last_tensor_is_sent_before_the_first_has_a_gradient(comm, coordinated):
    first, last = weights(2.0, 3.0)
    coordinator = coordinated(Noted(bucket_bytes=8), first, last)
    CALLS.clear()
    first.register_hook(lambda grad: CALLS.append(("gradient", 0)))
    with coordinator.busy():
        (last * (first * (comm.rank + 1))).sum().backward()
    assert [name for name, _ in CALLS] == ["final", "gradient", "final", "final"]
    mean = (comm.size + 1) / 2
    assert first.grad.tolist() == [3 * mean] * 5 and last.grad.tolist() == [2 * mean] * 5


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("strategy", [Auto(bucket_bytes=8), Ring(overlap=1)], ids=repr)
def test_gradients_of_several_passes_add_up(comm, coordinated, strategy):
    first, last = weights(2.0, 3.0)
    coordinator = coordinated(strategy, first, last)
    with coordinator.busy():
        for factor in (1, 10):
            (last * (first * (comm.rank + 1) * factor)).sum().backward()
    mean = 11 * (comm.size + 1) / 2
    assert torch.allclose(first.grad, torch.full((5,), 3 * mean)) and torch.allclose(last.grad, torch.full((5,), 2 * mean))


@pytest.mark.mpi(min_size=2)
def test_a_tensor_without_a_gradient_on_some_ranks_gets_that_of_the_others(comm, coordinated):
    first, last, never = weights(2.0, 3.0, 4.0)
    coordinator = coordinated(Auto(bucket_bytes=8), first, last, never)
    with coordinator.busy():
        ((last if comm.rank else 1.0) * first).sum().backward()
    assert never.grad is None
    assert torch.allclose(last.grad, torch.full((5,), 2 * (comm.size - 1) / comm.size))
    assert torch.allclose(first.grad, torch.full((5,), (3 * (comm.size - 1) + 1) / comm.size))


@pytest.mark.mpi(min_size=2)
def test_a_gradient_that_comes_once_more_in_a_pass_is_summed_too(comm, coordinated):
    from torch.utils.checkpoint import checkpoint

    first, last = weights(2.0, 3.0)
    coordinator = coordinated(Auto(bucket_bytes=8), first, last)
    with coordinator.busy():
        found = checkpoint(lambda x: x * last, first * (comm.rank + 1), use_reentrant=True)
        (last * found).sum().backward()
    mean = (comm.size + 1) / 2
    assert torch.allclose(last.grad, torch.full((5,), 2 * 3 * 2.0 * mean))
    assert torch.allclose(first.grad, torch.full((5,), 9 * mean))


class Broken(torch.autograd.Function):
    """Raises an error in the backward pass."""

    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, grad):
        raise ValueError("broken")


@pytest.mark.mpi(min_size=2)
def test_a_pass_that_fails_on_one_rank_is_told_on_the_others(comm, coordinated):
    first, last = weights(2.0, 3.0)
    coordinator = coordinated(Auto(bucket_bytes=8), first, last)
    with coordinator.busy():
        middle = first * 2
        with pytest.raises(ValueError if not comm.rank else MismatchError, match="broken"):
            try:
                (last * (middle if comm.rank else Broken.apply(middle))).sum().backward()
            except ValueError as error:
                coordinator.failed(error)
                raise


@pytest.mark.mpi(min_size=2)
def test_a_pass_that_fails_on_all_ranks_leaves_the_next_one_alone(comm, coordinated):
    first, last = weights(2.0, 3.0)
    coordinator = coordinated(Auto(bucket_bytes=8), first, last)
    with coordinator.busy():
        with pytest.raises(ValueError, match="broken"):
            (last * Broken.apply(first * 2)).sum().backward()
        first.grad = last.grad = None
        (last * (first * (comm.rank + 1))).sum().backward()
    mean = (comm.size + 1) / 2
    assert torch.allclose(first.grad, torch.full((5,), 3 * mean)) and torch.allclose(last.grad, torch.full((5,), 2 * mean))


@pytest.mark.mpi(min_size=2)
def test_a_hook_of_the_program_sees_whole_gradients(comm, coordinated):
    first, last = weights(2.0, 3.0)
    coordinator = coordinated(Auto(bucket_bytes=8), first, last)
    seen = []
    last.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.tolist()))
    with coordinator.busy():
        (last * (first * (comm.rank + 1))).sum().backward()
    assert seen == [[2.0 * (comm.rank + 1)] * 5]
    assert torch.allclose(last.grad, torch.full((5,), comm.size + 1.0))
