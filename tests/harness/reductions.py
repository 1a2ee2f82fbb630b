"""Layouts of ranks, what they give, and the sums that collectives must find."""

from __future__ import annotations

import functools

import numpy as np

from mpiddl.collectives import calls
from mpiddl.transport.base import COMBINE, MAX, MIN, PROD, SUM
from mpiddl.tuning.rule import OVER_VERBS

ALGORITHMS = ["auto", *(name for name in calls.ALLREDUCE if name not in OVER_VERBS)]  # which are others without a device
OPS = [SUM, MIN, MAX, PROD]
LAYOUTS = {
    "1": [0],
    "2": [0, 0],
    "1+1": [0, 1],
    "3": [0, 0, 0],
    "2+1": [0, 0, 1],
    "5": [0] * 5,
    "2+2 in turn": [0, 1, 0, 1],
    "2+3": [0, 0, 1, 1, 1],
    "1+4 mixed": [4, 4, 9, 4, 4],
    "1+1+1+1+1+1": list(range(6)),
    "3+3 in turn": [7, 5] * 3,
    "4+4+4": [rank // 4 for rank in range(12)],
    "5+5+6 in turn": [rank % 3 for rank in range(16)],
}
"""On which node each virtual rank is."""


def real_nodes(size):
    """The same for real ranks, which are on one machine but need not know it."""
    half = (size + 1) // 2
    return {
        "one": [0] * size,
        "own": list(range(size)),
        "halves": [rank // half for rank in range(size)],
        "in turn": [rank % 2 for rank in range(size)],
        "uneven": [min(rank, 1) for rank in range(size)],
    }


REAL = list(real_nodes(1))


def placed(link, layout):
    """A duplicate of a real communicator whose ranks believe to be on these nodes."""
    own = link.Dup()
    own.nodes = lambda: real_nodes(link.size)[layout]
    return own


def given(rank, n, dtype):
    """What a rank contributes: numbers whose sums and products are exact, in any order."""
    rng = np.random.default_rng([rank, n])
    values = rng.choice([-1, 1, 2], n)
    if np.dtype(dtype).kind == "c":
        values = values * np.array([1, 1j, -1, -1j])[rng.integers(0, 4, n)]
    return values.astype(dtype)


def fold(size, n, dtype, op):
    """The oracle: all ranks' contributions combined by numpy, in rank order."""
    return functools.reduce(COMBINE[op], [given(rank, n, dtype) for rank in range(size)])


def lengths(size):
    return dict.fromkeys([0, 1, size - 1, size, size + 1, 1000])


def ops(dtype):
    return [SUM, PROD] if np.dtype(dtype).kind == "c" else OPS


def rough(rank, n=3001):
    """Numbers whose sum depends on the order of adding."""
    return (np.random.default_rng(rank).standard_normal(n) * 10.0 ** (np.arange(n) % 7)).astype(np.float32)


def serial(parts, op=SUM):
    """The oracle: split at the largest power of two below the number of parts."""
    if len(parts) == 1:
        return parts[0]
    half = 1
    while 2 * half < len(parts):
        half *= 2
    return COMBINE[op](serial(parts[:half], op), serial(parts[half:], op))
