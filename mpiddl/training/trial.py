"""How long a gradient takes here: measured on rows of zeros, before any rows are read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from math import prod
from statistics import fmean
from typing import Any

import numpy as np

from mpiddl.data import Data
from mpiddl.machine.clock import enough, now
from mpiddl.memory import FlatBuffer, aligned_zeros
from mpiddl.node.topology import neighbours
from mpiddl.transport.comm import Comm


class Trial:
    """The gradient of one model, on any number of rows.

    Attributes
    ----------
    size, dtype : of the gradient.
    batch : rows of a step, over all ranks.
    """

    def __init__(self, model: Any, data: Data, dtype: str, batch: int, simulated_s: float | None = None,
                 slow: Mapping[int, float] | None = None):
        self.dtype, self.batch, self._simulated_s, self._slow = np.dtype(dtype), batch, simulated_s, slow or {}
        self.size = sum(prod(shape) for shape in model.shapes.values())
        self._model, self._data = model, data

    def gradient_seconds(self, comm: Comm, rows: int) -> list[float]:
        """Seconds that each rank takes for the gradient of so many rows. Collective.

        Those of ranks that the user makes slow (``slow``: a factor by rank) are multiplied.

        Kernels are compiled by one rank of each node first, while the others wait. In simulated time, a rank's share of the
        batch takes as long as the user says.
        """
        if self._simulated_s is not None:
            found = [self._simulated_s * rows * comm.size / self.batch] * comm.size
            return [each * self._slow.get(rank, 1.0) for rank, each in enumerate(found)]
        local = neighbours(comm).local
        if local.rank == 0:
            self._seconds(1)
        comm.patient_barrier()  # all compute at the same time, as in a step: they may share cores
        return comm.setup_allgather(self._seconds(max(rows, 1)) * self._slow.get(comm.rank, 1.0))

    def _seconds(self, rows: int) -> float:
        model, source = self._model, self._data.train
        params, grad = FlatBuffer(model.shapes, self.dtype), FlatBuffer(model.shapes, self.dtype)
        x = aligned_zeros(rows * prod(source.shape), self.dtype).reshape(rows, prod(source.shape))
        kind = self.dtype if source.classes is None else np.dtype(np.int64)
        y = aligned_zeros(rows * prod(source.targets), kind).reshape(rows, *source.targets)
        options = {}
        if "work" in inspect.signature(model.gradient).parameters and hasattr(model, "workspace"):
            options["work"] = model.workspace(rows, self.dtype)
        taken: list[float] = []
        while not enough(taken):
            began = now()
            model.gradient(params.views, x, y, grad.views, **options)
            taken.append(now() - began)
        return fmean(taken[1:])
