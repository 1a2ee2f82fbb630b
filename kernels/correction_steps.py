"""Mini-batch steps of variance-reduced SGD on the correction equation (theta - C) D = R, for a block D orthogonal to W.

    D <- D (1 - eta theta) + eta (C_b D + R),     C_b D = X_b^T (X_b D) / rows of the batch, centred

R = C W - W theta is exact, and C_b multiplies only the small D: as D tends to its limit, so does the noise. One step costs
4 b d k operations for a batch of b rows, and what it takes to gather them.
"""

from __future__ import annotations

from .jit import inlined, kernel
from .lanes import base, lanes_of, size_of
from .normal_product import BLOCK, add_normal, panel_vectors
from .thin import HEIGHT, thin_columns, thin_rows

_HEIGHTS = (0, *HEIGHT.values())


def steps_scratch(d: int, columns: int) -> int:
    """Elements of scratch memory that `correction_steps` needs."""
    return 2 * BLOCK * columns + d * columns + BLOCK * (d + 1) + columns * columns + columns


@kernel
def correction_steps(x, weights, mean, groups, size, rate, values, residual, w, every, block, sums, scratch):
    """One step for each line of `groups`, which says where its groups of `size` adjacent rows begin; in place on `block`.

    x (n, d), mean (d,), values (k,), residual, w and block (d, k) and `scratch` (`steps_scratch`) are C-contiguous and of one
    float dtype; k is a multiple of the lanes. weights (n,), or empty: ones. sums (k,) is float64 scratch. `block` is made
    orthogonal to `w` after `every` steps and at the end. BLOCK is a multiple of `size`.
    """
    d, k = block.shape
    image = scratch[2 * BLOCK * k : 2 * BLOCK * k + d * k].reshape(d, k)
    rest = scratch[2 * BLOCK * k + d * k :]
    batch = rest[: BLOCK * d].reshape(BLOCK, d)
    start = rest[BLOCK * d : BLOCK * d + k]
    inner = rest[BLOCK * d + k : BLOCK * d + k + k * k].reshape(k, k)
    factors = rest[BLOCK * d + k + k * k :][: BLOCK if weights.size else 0]
    one, eta = x.dtype.type(1), x.dtype.type(rate)
    for step in range(groups.shape[0]):
        image[:] = 0
        sums[:] = 0
        start[:] = 0
        for j in range(d):
            for c in range(k):
                start[c] -= mean[j] * block[j, c]
        mass = _add_batch(x, weights, groups[step], size, block, start, factors, batch, image, sums, scratch)
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
def _add_batch(x, weights, starts, size, block, start, factors, batch, image, sums, scratch):
    """image += X_b^T (X_b block + start), rows gathered by blocks; returns their weight."""
    n, d = x.shape
    k, lanes, mass = block.shape[1], lanes_of(x), 0.0
    filled = 0
    for g in range(starts.size):
        for i in range(starts[g], min(n, starts[g] + size)):
            if weights.size:
                factors[filled] = weights[i]
                mass += weights[i]
            else:
                mass += 1
            for j in range(d):
                batch[filled, j] = x[i, j]
            filled += 1
        if filled + size > BLOCK or g + 1 == starts.size:
            left = 0
            while left < k:
                vectors = panel_vectors(k - left, lanes)
                place = base(image) + size_of(x) * left
                add_normal(batch, block, start, factors, place, sums, scratch, 0, filled, left, vectors)
                left += vectors * lanes
            filled = 0
    return mass


@inlined
def _project(w, block, inner):
    """block -= w (w^T block)."""
    d, k = block.shape
    lanes, size = lanes_of(block), size_of(block)
    inner[:] = 0
    left = 0
    while left < k:
        vectors = panel_vectors(k - left, lanes)
        height = _HEIGHTS[vectors]
        for r in range(0, k, height):
            place = base(inner) + size * (r * k + left)
            rows = min(height, k - r)
            thin_columns(block, vectors, base(w) + size * r, k, base(block) + size * left, k, place, k, place, k, d, rows)
        left += vectors * lanes
    for r in range(k):
        for c in range(k):
            inner[r, c] = -inner[r, c]
    left = 0
    while left < k:
        vectors = panel_vectors(k - left, lanes)
        height = _HEIGHTS[vectors]
        for j in range(0, d, height):
            place = base(block) + size * (j * k + left)
            rows = min(height, d - j)
            thin_rows(block, vectors, base(w) + size * j * k, k, base(inner) + size * left, k, place, k, place, k, k, rows)
        left += vectors * lanes
