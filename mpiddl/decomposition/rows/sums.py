"""The all-reduce of solvers: short messages within a node need no compiled kernel.

A small decomposition then loads no numba, which takes a second.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl import collectives
from mpiddl.collectives.calls import WITHOUT_KERNELS
from mpiddl.transport.comm import Comm


def allreduce(comm: Comm, source: Any, result: np.ndarray) -> None:
    """The sum of all ranks' ``source`` in ``result``, as `mpiddl.collectives.allreduce`. Collective."""
    collectives.allreduce(comm, source, result, algorithm=WITHOUT_KERNELS)
