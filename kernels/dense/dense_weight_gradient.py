"""Weight and bias gradient of a dense layer: grad = x.T @ delta, and the sum of delta's rows; (2 k + 1) n m operations.

The sum runs over the rows, which are few, and the result is large: it is written once, and the place of the next tile
is fetched for writing meanwhile. Both factors are small and packed: x by columns, ROWS at a time; delta by panels, and
its rows are added up on the way. Packed once, delta serves for as many parts of the gradient as the caller asks for.

Where all ROWS columns of a row of x are zero, such as the border of an image or inactive units, nothing is computed: packing
leaves that row out, and a list says which are left. A sum without them has the same bits.
"""

from __future__ import annotations

from mpiddl.kernels.dense.blocking import PANEL_BYTES, panel_count, panel_edge, part_size, round_up
from mpiddl.kernels.dense.panels import copy_columns, copy_panel, word_at
from mpiddl.kernels.dense.tile import CHUNK, ROWS, tile_columns
from mpiddl.kernels.jit import inlined, kernel
from mpiddl.kernels.lanes import WIDTH, base, lanes_of, size_of

DEPTH = 256
BLOCK_BYTES = 1 << 18
BLOCK_ROWS = 256
WORD_BYTES = 4


def weight_gradient_scratch(rows: int, outputs: int, itemsize: int) -> int:
    """Elements of scratch memory that `weight_gradient` needs."""
    lanes, panel = WIDTH // itemsize, PANEL_BYTES // itemsize
    block = max(BLOCK_BYTES // itemsize, rows * ROWS)
    listed = (block // ROWS + BLOCK_ROWS // ROWS * (rows // DEPTH + 2)) * WORD_BYTES // itemsize + 1
    return panel + BLOCK_ROWS * panel + rows * round_up(outputs, lanes) + block + listed


@kernel
def weight_gradient(x, delta, grad, grad_bias, packed, scratch, begin, end):
    """grad[begin:end] = (x.T @ delta)[begin:end]; if end is k, grad_bias = the sum of the rows of delta, too.

    x (n, k), delta (n, m), grad (k, m) and grad_bias (m,) are C-contiguous and of one dtype; `scratch` holds
    `weight_gradient_scratch` elements. Without rows both gradients are zero. If `packed`, `scratch` is as the last call
    with this delta left it: delta is not packed again, and grad_bias is left alone.
    """
    n, m, size = x.shape[0], delta.shape[1], size_of(x)
    height = part_size(end - begin, max(ROWS, min(BLOCK_ROWS, BLOCK_BYTES // size // max(n, 1))), ROWS)
    # In scratch: a row of zeros, partial sums, delta, a block of x, and which of its rows it has.
    zeros = base(scratch)
    sums = zeros + PANEL_BYTES
    right = sums + BLOCK_ROWS * PANEL_BYTES
    left = right + n * round_up(m, lanes_of(x)) * size
    listed = left + max(BLOCK_BYTES, n * ROWS * size)
    if not packed:
        for j in range(PANEL_BYTES // size):
            scratch[j] = 0
        last = end == x.shape[1]
        if last:
            for j in range(m):
                grad_bias[j] = 0
        _pack_delta(delta, right, base(grad_bias) if last else 0)
    for top in range(begin, end, height):
        _block(x, m, base(grad), zeros, sums, right, left, listed, top, min(end, top + height))


@inlined
def _pack_delta(delta, right, sums):
    """delta by panels, one part of its rows after the other; they are added to `sums`, unless that is 0."""
    n, m = delta.shape
    lanes, size, depth = lanes_of(delta), size_of(delta), part_size(delta.shape[0], DEPTH, CHUNK)
    for k0 in range(0, n, depth):
        steps = min(depth, n - k0)
        for p in range(panel_count(m, lanes)):
            edge, beyond = panel_edge(p, m, lanes), panel_edge(p + 1, m, lanes)
            cols, stride = min(beyond, m) - edge, beyond - edge
            source, target = k0 * m + edge, k0 * round_up(m, lanes) + edge * steps
            below = sums + size * edge if sums else 0
            copy_panel(delta, base(delta) + size * source, m, steps, cols, right + size * target, stride, below)


@inlined
def _block(x, m, grad, zeros, sums, right, left, listed, top, bottom):
    """Rows top to bottom of the gradient."""
    n, k = x.shape
    lanes, size, depth = lanes_of(x), size_of(x), part_size(x.shape[0], DEPTH, CHUNK)
    groups, parts = (bottom - top + ROWS - 1) // ROWS, max(1, (n + depth - 1) // depth)
    counts = listed + WORD_BYTES * groups * n
    for part in range(parts):
        k0 = part * depth
        source, a, b = base(x) + size * (k0 * k + top), left + size * k0 * ROWS, listed + WORD_BYTES * k0
        count = counts + WORD_BYTES * part
        copy_columns(x, source, k, min(depth, n - k0), bottom - top, a, n * ROWS, b, n, count, parts)
    for p in range(panel_count(m, lanes)):
        edge, beyond = panel_edge(p, m, lanes), panel_edge(p + 1, m, lanes)
        # Without rows, one empty sum writes the zeros.
        for k0 in range(0, max(n, 1), depth):
            steps = min(depth, n - k0)
            b = right + size * (k0 * round_up(m, lanes) + edge * steps)
            for i in range(top, bottom, ROWS):
                a, kept = left + size * ((i - top) * n + k0 * ROWS), sums + (i - top) * PANEL_BYTES
                s, lds = (kept, beyond - edge) if k0 else (zeros, 0)
                c, ldc = (grad + size * (i * m + edge), m) if k0 + steps == n else (kept, beyond - edge)
                group = (i - top) // ROWS
                found = word_at(counts + WORD_BYTES * (group * parts + k0 // depth))
                rows = listed + WORD_BYTES * (group * n + k0)
                tile_columns(x, a, ROWS, b, s, lds, c, ldc, found, min(ROWS, bottom - i), min(beyond, m) - edge, rows)
