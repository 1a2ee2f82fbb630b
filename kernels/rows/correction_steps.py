"""Mini-batch steps of variance-reduced SGD on the correction equation (theta - C) D = R, for a block D orthogonal to W.

    D <- D (1 - eta theta) + eta (C_b D + R),     C_b D = X_b^T (X_b D) / rows of the batch, centred

R = C W - W theta is exact, and C_b multiplies only the small D: as D tends to its limit, so does the noise. One step costs
4 b d k operations for a batch of b rows, and what it takes to gather them.
"""

from __future__ import annotations

from mpiddl.kernels.jit import inlined, kernel
from mpiddl.kernels.lanes import base, size_of, unit_of
from mpiddl.kernels.rows.normal_product import BLOCK, add_normal, panel_units
from mpiddl.kernels.rows.thin import HEIGHT, thin_columns, thin_rows

_HEIGHTS = (0, *HEIGHT.values())


def steps_scratch(d: int, columns: int) -> int:
    """Elements of scratch memory that `correction_steps` needs."""
    return 2 * BLOCK * columns + d * columns + columns * columns + columns


@kernel
def correction_steps(x, weights, mean, groups, rate, values, residual, w, every, block, sums, scratch):
    """One step for each line of `groups`, which says where its groups of BLOCK adjacent rows begin; in place on `block`.

    x (n, d), mean (d,), values (k,), residual, w and block (d, k) and `scratch` (`steps_scratch`) are C-contiguous and of one
    float dtype; k is a multiple of the lanes of a unit. weights (n,), or empty: ones. sums (k,) is float64 scratch. `block` is
    made orthogonal to `w` after `every` steps and at the end.
    """
    d, k = block.shape
    image = scratch[2 * BLOCK * k : 2 * BLOCK * k + d * k].reshape(d, k)
    rest = scratch[2 * BLOCK * k + d * k :]
    start = rest[:k]
    inner = rest[k : k + k * k].reshape(k, k)
    one, eta = x.dtype.type(1), x.dtype.type(rate)
    for step in range(groups.shape[0]):
        image[:] = 0
        sums[:] = 0
        start[:] = 0
        for j in range(d):
            for c in range(k):
                start[c] -= mean[j] * block[j, c]
        mass = _add_batch(x, weights, groups[step], block, start, image, sums, scratch)
        scale = x.dtype.type(rate / mass)
        for c in range(k):
            start[c] = sums[c]
        for j in range(d):
            for c in range(k):
                kept = block[j, c] * (one - eta * values[c])
                block[j, c] = kept + scale * (image[j, c] - mean[j] * start[c]) + eta * residual[j, c]
        if (step + 1) % every == 0 or step + 1 == groups.shape[0]:
            _project(w, block, inner)


@inlined
def _add_batch(x, weights, starts, block, start, image, sums, scratch):
    """image += X_b^T (X_b block + start), group after group of rows; returns their weight."""
    n, d = x.shape
    k, lanes, mass = block.shape[1], unit_of(x), 0.0
    for g in range(starts.size):
        top, bottom, left = starts[g], min(n, starts[g] + BLOCK), 0
        ahead = base(x) + size_of(x) * starts[min(g + 1, starts.size - 1)] * d
        while left < k:
            units = panel_units(k - left, lanes)
            place = base(image) + size_of(x) * left
            add_normal(x, block, start, weights, place, sums, scratch, top, bottom, left, units, ahead if left == 0 else 0)
            left += units * lanes
        for i in range(top, bottom):
            mass += weights[i] if weights.size else 1
    return mass


@inlined
def _project(w, block, inner):
    """block -= w (w^T block)."""
    d, k = block.shape
    lanes, size = unit_of(block), size_of(block)
    inner[:] = 0
    left = 0
    while left < k:
        units = panel_units(k - left, lanes)
        height = _HEIGHTS[units]
        for r in range(0, k, height):
            place = base(inner) + size * (r * k + left)
            rows = min(height, k - r)
            thin_columns(block, units, base(w) + size * r, k, base(block) + size * left, k, place, k, place, k, d, rows)
        left += units * lanes
    for r in range(k):
        for c in range(k):
            inner[r, c] = -inner[r, c]
    left = 0
    while left < k:
        units = panel_units(k - left, lanes)
        height = _HEIGHTS[units]
        for j in range(0, d, height):
            place = base(block) + size * (j * k + left)
            rows = min(height, d - j)
            thin_rows(block, units, base(w) + size * j * k, k, base(inner) + size * left, k, place, k, place, k, k, rows)
        left += units * lanes
