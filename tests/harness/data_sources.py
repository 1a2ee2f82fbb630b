"""Rows of a source of data, and whether it gives them whole and in ranges."""

from __future__ import annotations

import numpy as np


def rng():
    return np.random.default_rng(0)


def pair(n=40, dtype="float32"):
    return rng().normal(size=(n, 2, 3)).astype(dtype), np.arange(n) % 4


def check_source(source, x, y):
    """A source has these rows, whole and in ranges."""
    x = x.reshape(len(x), -1)
    assert source.n == len(x)
    for ranges in ([range(len(x))], [range(1, 3), range(3, 3), range(5, 12), range(len(x) - 1, len(x))], []):
        parts = source.read(ranges)
        assert len(parts) == len(ranges)
        for rows, (got, labels) in zip(ranges, parts, strict=True):
            np.testing.assert_array_equal(got, x[rows.start : rows.stop])
            np.testing.assert_array_equal(labels, y[rows.start : rows.stop])
            assert got.flags.c_contiguous
            assert got.flags.aligned
