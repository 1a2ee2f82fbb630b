"""Rows of a data set into a batch, converted and scaled on the way."""

from __future__ import annotations

from .jit import kernel


@kernel
def gather_rows(source, index, scale, out):
    """out[i] = source[index[i]] * scale; reads and writes each element once.

    `source` is 2-D (uint8, float32 or float64), `index` int64, `out` 2-D (float32 or float64) and `scale` a scalar of
    the dtype of `out`. Returns the first position whose index is outside the rows of `source` (it and those behind it
    are not written), or -1.
    """
    rows = source.shape[0]
    for i in range(index.size):
        row = index[i]
        if row < 0 or row >= rows:
            return i
        for j in range(source.shape[1]):
            out[i, j] = source[row, j] * scale
    return -1
