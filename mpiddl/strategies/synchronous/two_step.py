"""Synchronous SGD whose sums go through shared memory inside a node and by rings across nodes.

The gradient is computed in shared memory of the node, and the update reads the one sum of the node: nothing is copied. The
step is that of `allreduce`, to rounding.

Cost a step: 2 (N-1)/N V sent by a node, N nodes, by all its ranks in parallel (form=leader: by one of them).
Source: see `mpiddl.collectives.allreduce_two_step`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpiddl.collectives import TwoStep as Reduction
from mpiddl.collectives.wire import MPI, check_transport
from mpiddl.errors import UsageError
from mpiddl.strategies.synchronous.gradient_sum import GradientSum
from mpiddl.transport.comm import Comm

FORMS = ("slices", "leader")


@dataclass(frozen=True)
class TwoStep(GradientSum):
    """Sum the gradients over all ranks in every step, in two steps. ``form``: all ranks or one leader talk to other nodes.

    ``transport``: over mpi, or over RDMA verbs where they work."""

    sums_gradients = True

    form: str = "slices"
    transport: str = MPI

    def check(self, size: int) -> None:
        if self.form not in FORMS:
            raise UsageError(f"strategy two-step: form: got {self.form!r}, expected {' or '.join(FORMS)}")
        check_transport("strategy two-step: transport", self.transport)

    def reduction(self, comm: Comm, size: int, dtype: np.dtype) -> Reduction:
        return Reduction(comm, size, dtype, leader=self.form == "leader", transport=self.transport)
