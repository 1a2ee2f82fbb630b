"""Input gradient of a dense layer: hidden = (delta @ weight.T) * slope of the activation; 2 n k m operations.

Computed as (weight @ delta.T).T, so that the weights, the largest factor, are read along their rows as they lie; delta
and the result, which have few rows, are transposed in registers, the latter on its way through the slope.
"""

from __future__ import annotations

from mpiddl.kernels.dense.blocking import PANEL_BYTES, panel_count, panel_edge, part_size, round_up
from mpiddl.kernels.dense.panels import transpose_panel, transpose_times_slope
from mpiddl.kernels.dense.tile import CHUNK, ROWS, tile_rows
from mpiddl.kernels.jit import inlined, kernel
from mpiddl.kernels.lanes import WIDTH, base, lanes_of, size_of

DEPTH = 256
BLOCK_BYTES = 1 << 17


def input_gradient_scratch(rows: int, outputs: int, itemsize: int) -> int:
    """Elements of scratch memory that `input_gradient` needs."""
    tall = round_up(rows, WIDTH // itemsize)
    return PANEL_BYTES // itemsize + max(BLOCK_BYTES // itemsize, ROWS * tall) + outputs * tall


@kernel
def input_gradient(delta, weight, activation, hidden, scratch, begin, end):
    """hidden[:, begin:end] = (delta @ weight.T)[:, begin:end] * slope.

    `hidden` (n, k) comes holding the value of the activation (IDENTITY, RELU, TANH, LOGISTIC), from which its slope follows.
    delta (n, m), weight (k, m) and hidden are C-contiguous and of one dtype; `scratch` holds `input_gradient_scratch`
    elements.
    """
    n, k, size = delta.shape[0], weight.shape[0], size_of(delta)
    tall = round_up(n, lanes_of(delta))
    height = part_size(end - begin, max(ROWS, BLOCK_BYTES // size // max(tall, 1)), ROWS)
    # In scratch: a row of zeros, a block of the transposed result, delta transposed.
    zeros = base(scratch)
    for j in range(PANEL_BYTES // size):
        scratch[j] = 0
    block = zeros + PANEL_BYTES
    right = block + size * height * tall
    _pack_delta(delta, right)
    for top in range(begin, end, height):
        bottom = min(end, top + height)
        _block(n, weight, zeros, block, right, top, bottom)
        transpose_times_slope(delta, block, tall, bottom - top, n, base(hidden) + size * top, k, activation)


@inlined
def _pack_delta(delta, right):
    """delta transposed, by panels, one part of its columns after the other."""
    n, m = delta.shape
    lanes, size, depth = lanes_of(delta), size_of(delta), part_size(delta.shape[1], DEPTH, CHUNK)
    for k0 in range(0, m, depth):
        steps = min(depth, m - k0)
        for p in range(panel_count(n, lanes)):
            edge, beyond = panel_edge(p, n, lanes), panel_edge(p + 1, n, lanes)
            source, target = edge * m + k0, k0 * round_up(n, lanes) + edge * steps
            rows, stride = min(beyond, n) - edge, beyond - edge
            transpose_panel(delta, base(delta) + size * source, m, rows, steps, right + size * target, stride)


@inlined
def _block(n, weight, zeros, block, right, top, bottom):
    """Rows top to bottom of weight @ delta.T."""
    m, lanes, size = weight.shape[1], lanes_of(weight), size_of(weight)
    tall, depth = round_up(n, lanes), part_size(weight.shape[1], DEPTH, CHUNK)
    for k0 in range(0, m, depth):
        steps = min(depth, m - k0)
        for p in range(panel_count(n, lanes)):
            edge, beyond = panel_edge(p, n, lanes), panel_edge(p + 1, n, lanes)
            b = right + size * (k0 * tall + edge * steps)
            for i in range(top, bottom, ROWS):
                a, kept = base(weight) + size * (i * m + k0), block + size * ((i - top) * tall + edge)
                s, lds = (kept, tall) if k0 else (zeros, 0)
                rows, cols = min(ROWS, bottom - i), min(beyond, n) - edge
                tile_rows(weight, a, m, b, s, lds, kept, tall, steps, rows, cols, 0, b, 0)
