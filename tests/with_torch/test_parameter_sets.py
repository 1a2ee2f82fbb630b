"""Sets of parameters: optimisers that come and go."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mpiddl.strategies.synchronous.auto import Auto  # noqa: E402
from mpiddl.torch.coordinator import Coordinator  # noqa: E402
from mpiddl.torch.meeting import Event, Row, meet  # noqa: E402
from mpiddl.torch.parameter_sets import KEPT  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=2)


def weight():
    return torch.ones(3, requires_grad=True)


def test_sets_of_optimisers_that_are_gone_are_dropped(comm, link):
    coordinator, kept = Coordinator(link.Dup(), Auto()), weight()
    first = torch.optim.SGD([kept], lr=1.0)
    coordinator.add(first)
    for _ in range(3 * KEPT):
        tensor = weight()
        optimiser = torch.optim.SGD([tensor], lr=1.0)
        coordinator.add(optimiser)
        with coordinator.busy():
            (tensor * comm.rank).sum().backward()
        assert torch.allclose(tensor.grad, torch.full((3,), (comm.size - 1) / 2))
    assert len(coordinator.sets) <= KEPT + 1
    with coordinator.busy():
        (kept * comm.rank).sum().backward()
    assert torch.allclose(kept.grad, torch.full((3,), (comm.size - 1) / 2))
    coordinator.finish()
    for parameters in coordinator.sets:
        parameters.free()
    coordinator.comm.Free()


@pytest.mark.parametrize("most", [0, 2, 5])
def test_a_meeting_has_room_for_any_number_of_sets(comm, link, most):
    def row(rank):
        count = most if rank else 1
        return Row(Event.GRADIENT, 1, rank, 7, (1 << count) - 1, 3, 0, rank % 2, tuple(range(rank, rank + count)))

    assert meet(link, row(comm.rank)) == [row(rank) for rank in range(comm.size)]
