"""Steps of VR-PCA as it was published, one row at a time: 4 d operations each."""

from __future__ import annotations

from math import sqrt

from mpiddl.kernels.jit import kernel


@kernel
def plain_steps(x, mean, rows, rate, gradient, anchor, w):
    """w <- w + rate ((x_i - mean) (x_i - mean).(w - anchor) + gradient), w <- w / ||w||, for each i of `rows`; in place.

    x (n, d), the others (d,), all of one float dtype. Shamir 2015, arXiv:1409.2848, algorithm 1.
    """
    step = x.dtype.type(rate)
    for i in rows:
        along = x.dtype.type(0)
        for j in range(w.size):
            along += (x[i, j] - mean[j]) * (w[j] - anchor[j])
        size = x.dtype.type(0)
        for j in range(w.size):
            w[j] += step * ((x[i, j] - mean[j]) * along + gradient[j])
            size += w[j] * w[j]
        scale = x.dtype.type(1 / sqrt(size))
        for j in range(w.size):
            w[j] *= scale
