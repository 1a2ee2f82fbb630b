"""A gradient that has arrived at a parameter server, and the statistics of staleness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Push:
    """A gradient that has arrived at a server, with its shard.

    params, grad : arrays of the shard; ``grad`` is the mean over a batch and may be overwritten.
    before : the shard as the worker pulled it.
    worker, workers : the pushing worker, and the number of workers.
    delay : updates of the shard since the worker pulled it.
    count : applied pushes of this worker.
    rate : learning rate of the update.
    moments : the optimiser's moments for this update, and
    applied : the number of updates that they have seen.
    sums : for each layer of the model, the sum of the gradient's magnitudes, if the rule wants it.
    layers : the parts of the shard that belong to a layer, each with the number of the layer.
    proportional : updates are proportional to the gradients (`mpiddl.strategies.base.Replica`).
    """

    params: np.ndarray
    grad: np.ndarray
    before: np.ndarray
    worker: int
    workers: int
    delay: int
    count: int
    rate: float
    moments: dict[str, np.ndarray] = field(default_factory=dict)
    applied: int = 0
    sums: np.ndarray = field(default_factory=lambda: np.empty(0))
    layers: Sequence[tuple[int, slice]] = ()
    proportional: bool = True


def layers_of(layers: Sequence[slice], begin: int, end: int) -> list[tuple[int, slice]]:
    """The parts of a shard from ``begin`` to ``end`` that belong to a layer, each with the number of the layer.

    Examples
    --------
    >>> layers_of([slice(0, 10), slice(10, 14)], 8, 12)
    [(0, slice(0, 2, None)), (1, slice(2, 4, None))]
    """
    parts = ((max(part.start, begin), min(part.stop, end)) for part in layers)
    return [(number, slice(low - begin, high - begin)) for number, (low, high) in enumerate(parts) if low < high]


def staleness(delays: dict[str, int]) -> dict[str, Any]:
    """Summarise the delays of all pushes: number of pushes, median, 95 % quantile, maximum and histogram.

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
