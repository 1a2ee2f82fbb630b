"""The gradients of some parameters, summed over all ranks by a strategy into the mean that one rank would compute.

A rank's gradient is a mean over its own samples. Multiplied by its share of all samples, it adds up to the mean over all
samples, however uneven the shares are. One more number for each tensor says whether the rank has a gradient of it: a tensor
without a gradient on all ranks has none afterwards either, so that optimisers skip it as on one rank.

Cost: the strategy's, for V + 4 bytes a tensor; one copy of V into the buffer that other ranks read, and one out of it. The
tensors' gradients are views of one flat tensor, which is written over in each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mpiddl.memory import aligned_zeros
from mpiddl.strategies.base import Strategy
from mpiddl.strategies.flat_sum import FlatSum
from mpiddl.torch.flat_tensors import SUMMED, laid_over, over_numpy, real_numbers, spans
from mpiddl.transport.comm import Comm


class SummedGradients:
    """Gradients of tensors of one dtype and device.

    Parameters
    ----------
    comm : Comm
        Used for this alone; freed with `Free`.
    strategy : Strategy
        One that sums gradients in every step.
    tensors : sequence of torch.Tensor
        Leaves that require gradients.
    """

    def __init__(self, comm: Comm, strategy: Strategy, tensors: Sequence[torch.Tensor]):
        self._comm, self.tensors = comm, list(tensors)
        first, kind = tensors[0], SUMMED[tensors[0].dtype]
        self._n = sum(map(real_numbers, tensors))
        self._sum = FlatSum(comm, strategy, self._n + len(tensors), kind)
        self._views = over_numpy(self._sum.send[: self._n], tensors)
        self._result = aligned_zeros(self._n, kind)
        shared = torch.from_numpy(self._result)
        self._direct = first.device.type == "cpu" and first.dtype in (shared.dtype, torch.complex64, torch.complex128)
        self._mean = shared if self._direct else torch.zeros(self._n, dtype=_real(first.dtype), device=first.device)
        self.means = [laid_over(self._mean[part], tensor) for part, tensor in zip(spans(tensors), tensors, strict=True)]

    @torch.no_grad()
    def exchange(self, before: float, after: float) -> None:
        """Replace each gradient by ``after`` times the sum over all ranks of ``before`` times the gradient. Collective."""
        means = self.total([tensor.grad for tensor in self.tensors], before, after)
        for tensor, mean in zip(self.tensors, means, strict=True):
            if mean is None:
                tensor.grad = None
            elif tensor.grad is not None and tensor.grad.is_sparse:
                tensor.grad = mean.to_sparse(1)
            elif tensor.grad is not mean:
                tensor.grad = mean

    @torch.no_grad()
    def total(self, grads: Sequence[torch.Tensor | None], before: float, after: float) -> list[torch.Tensor | None]:
        """The same of ``grads``, without a change of them: in memory that the next call writes over. Collective."""
        self._fill(grads, before)
        total = self._sum()
        np.multiply(total[: self._n], self._result.dtype.type(after), out=self._result)
        if not self._direct:
            self._mean.copy_(torch.from_numpy(self._result))
        present = total[self._n :] > 0
        return [mean if there else None for mean, there in zip(self.means, present.tolist(), strict=True)]

    def _fill(self, grads: Sequence[torch.Tensor | None], factor: float) -> None:
        flags = self._sum.send[self._n :]
        flags[:] = 0.0
        given, into = [], []
        for number, (grad, view) in enumerate(zip(grads, self._views, strict=True)):
            if grad is None or not factor:
                view.zero_()
                continue
            flags[number] = 1.0
            given.append(grad.to_dense() if grad.layout != torch.strided else grad.detach())
            into.append(view)
        if factor == 1.0 and into:
            torch._foreach_copy_(into, given)
        else:
            for view, grad in zip(into, given, strict=True):
                torch.mul(grad, factor, out=view) if grad.device.type == "cpu" else view.copy_(grad * factor)

    def Free(self) -> None:
        """Collective."""
        self._sum.finish()
        self._comm.Free()


def _real(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
