"""Autograd between whole tensors and their parts: first and second derivatives, on any number of ranks."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.mpi


def test_derivatives_of_parts_and_wholes(link):
    from mpiddl.torch.divided_tensors import gathered, own_part

    torch.manual_seed(0)
    for length, dim in ((5, 0), (7, 1), (1, 0)):
        shape = [3, 3]
        shape[dim] = length

        def through_parts(whole, dim=dim, length=length):
            return gathered(own_part(whole, link, dim).sin(), link, dim, length)

        whole = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.allclose(through_parts(whole), whole.sin())
        assert torch.autograd.gradcheck(through_parts, whole)
        assert torch.autograd.gradgradcheck(through_parts, whole)


def test_derivatives_of_sums(link):
    from mpiddl.torch.divided_tensors import own_part, reduced, shared, summed

    torch.manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64)

    def mean(weight):
        (mine,) = shared([weight], lambda grads: [grad if grad is None else summed(grad, link) for grad in grads])
        part = own_part(x, link, 0)
        return reduced((part @ mine).sin().mean(0) if len(part) else mine.sum(0) * 0, link, len(part) / len(x))

    weight = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(mean(weight), (x @ weight).sin().mean(0))
    assert torch.autograd.gradcheck(mean, weight)
    assert torch.autograd.gradgradcheck(mean, weight)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "complex128"])
def test_dtypes(link, dtype):
    from mpiddl.torch.divided_tensors import gathered, own_part, summed

    whole = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype)).t()
    part = own_part(whole, link, 0)
    assert gathered(part, link, 0, 4).dtype == whole.dtype
    assert torch.equal(gathered(part, link, 0, 4), whole)
    assert torch.equal(summed(whole, link), whole * link.size)


def test_every_rank_has_a_part_in_order(link):
    from mpiddl.torch.divided_tensors import own_part

    parts = link.allgather(own_part(torch.arange(9), link, 0).tolist())
    assert list(chain(*parts)) == list(range(9))
    assert all(len(a) >= len(b) for a, b in pairwise(parts))
