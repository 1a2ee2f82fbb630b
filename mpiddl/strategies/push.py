"""A gradient that has come to a parameter server, and what is told of how late such gradients were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Push:
    """A gradient that has come to a server, and the shard it is of.

    params, grad : arrays of the shard; ``grad`` is the mean over a batch, and may be overwritten.
    before : the shard as the worker pulled it.
    worker, workers : who it is of, and how many there are.
    delay : updates of the shard since then.
    count : pushes of this worker that have been applied.
    size : of the whole model.
    rate : of the update that takes it.
    """

    params: np.ndarray
    grad: np.ndarray
    before: np.ndarray
    worker: int
    workers: int
    delay: int
    count: int
    size: int
    rate: float


def staleness(delays: dict[str, int]) -> dict[str, Any]:
    """What pushes met: how many had which delay, the delay that half and that 95 % of them did not pass, the longest.

    Examples
    --------
    >>> staleness({"0": 5, "2": 4, "7": 1})
    {'pushes': 10, 'median': 0, 'of_95': 7, 'longest': 7, 'histogram': {'0': 5, '2': 4, '7': 1}}
    """
    found = sorted((int(delay), count) for delay, count in delays.items())
    each = np.repeat([delay for delay, _ in found], [count for _, count in found]) if found else np.zeros(1, int)
    half, most = (int(each[int(np.ceil(share * len(each))) - 1]) for share in (0.5, 0.95))
    histogram = {str(delay): count for delay, count in found}
    return {"pushes": sum(histogram.values()), "median": half, "of_95": most, "longest": int(each[-1]), "histogram": histogram}
