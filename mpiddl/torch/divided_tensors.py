"""Functions of autograd between a tensor that all ranks have whole and the parts of it that single ranks compute with.

Each has the other as its derivative: a part is taken of what is whole, and parts are gathered into a whole; what each rank uses
whole has the sum over all ranks as its gradient. Derivatives of derivatives therefore work, too.

Cost: `gathered` (P-1)/P V a rank, V being the whole tensor; `summed` that of the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpiddl.collectives import allgather, allreduce
from mpiddl.layout import block
from mpiddl.torch.flat_tensors import SUMMED
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm

Sum = Callable[[Sequence[Tensor | None]], list[Tensor | None]]
"""The sums over all ranks of some tensors. Collective."""


def own_part(whole: Tensor, comm: Comm, dim: int) -> Tensor:
    """This rank's part of a tensor that all ranks have, along a dimension."""
    return _OwnPart.apply(whole, comm, dim)


def gathered(part: Tensor, comm: Comm, dim: int, length: int) -> Tensor:
    """The whole tensor, ``length`` long in ``dim``, of which each rank brings its part. Collective, and so is its gradient."""
    return _Gathered.apply(part, comm, dim, length)


def shared(tensors: Sequence[Tensor], total: Sum) -> tuple[Tensor, ...]:
    """The same tensors; their gradients are summed over all ranks by ``total``. Its gradient is collective."""
    return _Shared.apply(total, *tensors) if tensors else ()


def reduced(part: Tensor, comm: Comm, weight: float) -> Tensor:
    """The sum over all ranks of a tensor times the rank's ``weight``. Collective; its gradient is not."""
    return _Reduced.apply(part, comm, weight)


def counted_once(tensor: Tensor, size: int) -> Tensor:
    """The same tensor, which all ranks have computed alike: each rank passes on its share of the gradient."""
    return _CountedOnce.apply(tensor, size) if tensor.requires_grad else tensor


@torch.no_grad()
def summed(tensor: Tensor, comm: Comm) -> Tensor:
    """The sum over all ranks of a tensor of any type that autograd differentiates. Collective."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kind = torch.from_numpy(np.empty(0, SUMMED[tensor.dtype])).dtype
    numbers = real.cpu().to(kind, memory_format=torch.contiguous_format, copy=True)
    allreduce(comm, IN_PLACE, numbers.numpy())
    found = numbers.to(real.device, real.dtype)
    return torch.view_as_complex(found) if tensor.is_complex() else found


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: Comm, weight: float) -> Tensor:
        ctx.comm, ctx.weight = comm, weight
        return summed(part * weight, comm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Weighted.apply(grad, ctx.comm, ctx.weight), None, None


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, comm: Comm, weight: float) -> Tensor:
        ctx.comm, ctx.weight = comm, weight
        return whole * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduced(grad, ctx.comm, ctx.weight), None, None


class _CountedOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int) -> Tensor:
        ctx.size = size
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.size, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, comm: Comm, dim: int) -> Tensor:
        ctx.comm, ctx.dim, ctx.length = comm, dim, whole.shape[dim]
        kept = block(whole.shape[dim], comm.size, comm.rank)
        return whole.narrow(dim, kept.start, len(kept)).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gathered(grad, ctx.comm, ctx.dim, ctx.length), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: Comm, dim: int, length: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return gather(part, comm, dim, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return own_part(grad, ctx.comm, ctx.dim), None, None, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Sum, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *_Summed.apply(ctx.total, *grads)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Sum, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return tuple(total(grads))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        there = [grad is not None for grad in grads]
        found = iter(shared([grad for grad in grads if grad is not None], ctx.total))
        return None, *(next(found) if kept else None for kept in there)


@torch.no_grad()
def gather(part: Tensor, comm: Comm, dim: int, length: int) -> Tensor:
    """`gathered`, without a gradient. Parts are sent in a common length, that of the longest."""
    shape = list(part.shape)
    shape[dim] = len(block(length, comm.size, 0))
    filled = part.contiguous() if shape == list(part.shape) else part.new_zeros(shape)
    if filled.shape != part.shape:
        filled.narrow(dim, 0, part.shape[dim]).copy_(part)
    mine = _bytes(filled)
    everything = np.empty(comm.size * mine.size, np.uint8)
    allgather(comm, mine, everything)
    shape[dim] = length
    whole = part.new_empty(shape)
    parts = torch.from_numpy(everything).view(part.dtype).view(comm.size, *filled.shape)
    for rank in range(comm.size):
        kept = block(length, comm.size, rank)
        whole.narrow(dim, kept.start, len(kept)).copy_(parts[rank].narrow(dim, 0, len(kept)))
    return whole


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()
