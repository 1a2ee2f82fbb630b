"""The gradients of some parameters, summed over all ranks by a strategy into the mean that one rank would compute.

A rank's gradient is a mean over its own samples. Multiplied by its share of all samples, it adds up to the mean over all
samples, however uneven the shares are. One more number for each tensor says whether the rank has a gradient of it: a tensor
without a gradient on all ranks has none afterwards either, so that optimisers skip it as on one rank.

Where the strategy allows it, gradients are sent during the backward pass, from the last tensor to the first
(`SummedGradients.begin`, `final`, `end`).

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

EXTRA = 2
"""Further numbers in front of the gradients: whether the pass failed, and whether a tensor got a gradient twice in it."""

SPARSE = 1 + 2**-12
"""Flag of a sparse gradient; that of another one is 1. The fraction of the sum over ranks tells whether one was sparse."""

ALIGNED = 16
"""Gradients begin at a multiple of so many elements."""


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

    Attributes
    ----------
    overlaps : bool
        Gradients can be sent during the backward pass.
    """

    def __init__(self, comm: Comm, strategy: Strategy, tensors: Sequence[torch.Tensor]):
        self._comm, self.tensors = comm, list(tensors)
        first, kind = tensors[0], SUMMED[tensors[0].dtype]
        self._n, self._lead = sum(map(real_numbers, tensors)), -(-(len(tensors) + EXTRA) // ALIGNED) * ALIGNED
        self._sum = FlatSum(comm, strategy, self._lead + self._n, kind)
        self.overlaps = self._sum.overlaps
        self._flags = self._sum.send[: self._lead]  # sent last
        self._views = over_numpy(self._sum.send[self._lead :], tensors)
        self._starts = [self._lead + part.start for part in spans(tensors)]
        self._result = aligned_zeros(self._n, kind)
        shared = torch.from_numpy(self._result)
        self._direct = first.device.type == "cpu" and first.dtype in (shared.dtype, torch.complex64, torch.complex128)
        self._mean = shared if self._direct else torch.zeros(self._n, dtype=_real(first.dtype), device=first.device)
        self.means = [laid_over(self._mean[part], tensor) for part, tensor in zip(spans(tensors), tensors, strict=True)]
        self._sent, self._open, self._before, self._sparse = [False] * len(tensors), 0, 1.0, set[int]()
        self._extra, self._late = [0.0] * EXTRA, False

    @torch.no_grad()
    def exchange(self, before: float, after: float) -> None:
        """Replace each gradient by ``after`` times the sum over all ranks of ``before`` times the gradient. Collective."""
        self._give(self.total([tensor.grad for tensor in self.tensors], before, after))

    def _give(self, means: Sequence[torch.Tensor | None]) -> None:
        for number, (tensor, mean) in enumerate(zip(self.tensors, means, strict=True)):
            if mean is None:
                tensor.grad = None
            elif number in self._sparse:
                tensor.grad = mean.to_sparse(1)
            elif tensor.grad is not None and tensor.grad.requires_grad:
                tensor.grad.data.copy_(mean)  # the program may differentiate it
            elif tensor.grad is not mean:
                tensor.grad = mean

    @torch.no_grad()
    def total(self, grads: Sequence[torch.Tensor | None], before: float, after: float) -> list[torch.Tensor | None]:
        """The same of ``grads``, without a change of them: in memory that the next call writes over. Collective."""
        self._fill(grads, before)
        return self._summed(after)

    def _summed(self, after: float) -> list[torch.Tensor | None]:
        for start in reversed(self._starts):
            self._sum.ready(start)
        total = self._sum()
        self._extra = total[len(self.tensors) : len(self.tensors) + EXTRA].tolist()
        np.multiply(total[self._lead :], self._result.dtype.type(after), out=self._result)
        if not self._direct:
            self._mean.copy_(torch.from_numpy(self._result))
        flags = total[: len(self.tensors)]
        self._sparse = set(np.flatnonzero(flags % 1).tolist())
        return [mean if there else None for mean, there in zip(self.means, (flags > 0).tolist(), strict=True)]

    def _fill(self, grads: Sequence[torch.Tensor | None], factor: float) -> None:
        self._flags[:] = 0.0
        given, into = [], []
        for number, (grad, view) in enumerate(zip(grads, self._views, strict=True)):
            if grad is None or not factor:
                view.zero_()
                continue
            if factor == 1.0 and grad.layout == torch.strided:
                self._flags[number] = 1.0
                given.append(grad.detach())
                into.append(view)
            else:
                self._write(number, grad, factor)
        if into:
            torch._foreach_copy_(into, given)

    def _write(self, number: int, grad: torch.Tensor, factor: float) -> None:
        view = self._views[number]
        self._flags[number] = 1.0 if grad.layout == torch.strided else SPARSE
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        if factor == 1.0:
            view.copy_(grad.detach())
        elif grad.device.type == "cpu":
            torch.mul(grad.detach(), factor, out=view)
        else:
            view.copy_(grad * factor)

    # During the backward pass

    def begin(self, before: float) -> None:
        """A backward pass begins, whose gradients are exchanged as by `exchange`, with this ``before``. On all ranks."""
        self._before, self._sent, self._open = before, [False] * len(self.tensors), len(self.tensors)
        self._flags[:], self._late = 0.0, False

    @torch.no_grad()
    def final(self, number: int) -> None:
        """Tensor ``number`` has its gradient: copy it, and start to sum all that is complete."""
        if self._sent[number]:
            self._late = True  # once more in the same pass: `end` exchanges all
            return
        self._sent[number] = True
        grad, view = self.tensors[number].grad, self._views[number]
        if grad is None or not self._before:
            view.zero_()
        else:
            self._write(number, grad, self._before)
        while self._open and self._sent[self._open - 1]:
            self._open -= 1
            self._sum.ready(self._starts[self._open])

    @torch.no_grad()
    def end(self, after: float, failed: bool = False, dropped: bool = False) -> bool:
        """The backward pass is over: give the tensors the means. Returns whether the pass failed on a rank. Collective.

        ``dropped``: leave the gradients as they are; the program has gone on since the pass has failed.
        """
        late = self._late
        for number in range(len(self.tensors)):
            if not self._sent[number]:
                self.final(number)
        self._flags[len(self.tensors) :][:EXTRA] = failed, late
        means = self._summed(after)
        failures, ranks_late = self._extra
        if ranks_late:
            means = self.total([tensor.grad for tensor in self.tensors], self._before, after)
        if not dropped:
            self._give(means)
        return failures > 0

    def Free(self) -> None:
        """Collective."""
        self._sum.finish()
        self._comm.Free()


def _real(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
