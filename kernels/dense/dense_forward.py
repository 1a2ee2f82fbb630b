"""Forward product of a dense layer: out = activation(x @ weight + bias); 2 n k m operations.

The weights stream through the caches once for every ROWS_AT_ONCE rows of x. A panel of them, DEPTH rows high and as
wide as a tile, is packed while the first tile reads it and then serves all rows of x from the first cache, while the
next panel is being fetched. Partial sums wait in `scratch`: lines of `out` whose length is a power of two would throw
each other out of the caches.
"""

from __future__ import annotations

from mpiddl.kernels.dense.blocking import PANEL_BYTES, panel_count, panel_edge, part_size
from mpiddl.kernels.dense.panels import LOGISTIC, RELU, TANH
from mpiddl.kernels.dense.tile import CHUNK, ROWS, VECTORS, tile_first, tile_rows
from mpiddl.kernels.elementwise import logistic_columns, tanh_columns
from mpiddl.kernels.jit import inlined, kernel
from mpiddl.kernels.lanes import base, lanes_of, size_of

DEPTH = 128
ROWS_AT_ONCE = 256
SUM_BYTES = 1 << 19
"""For the partial sums of a block. Half of it is as fast on a quiet machine, but reads x from the third cache twice as
often, which costs where neighbours use that too; so with BLOCK_BYTES of the gradients."""


def forward_scratch(itemsize: int) -> int:
    """Elements of scratch memory that `forward` needs."""
    return (DEPTH * PANEL_BYTES + max(SUM_BYTES, ROWS_AT_ONCE * PANEL_BYTES)) // itemsize


@kernel
def forward(x, weight, bias, activation, out, scratch, begin, end):
    """out[:, begin:end] = activation(x @ weight + bias)[:, begin:end].

    x (n, k), weight (k, m), bias (m,) and out (n, m) are C-contiguous and of one dtype; `activation` is IDENTITY,
    RELU, TANH or LOGISTIC; `scratch` holds `forward_scratch` elements.
    """
    n = x.shape[0]
    for top in range(0, n, ROWS_AT_ONCE):
        bottom = min(n, top + ROWS_AT_ONCE)
        width = max(1, SUM_BYTES // (PANEL_BYTES * (bottom - top))) * (PANEL_BYTES // size_of(x))
        for left in range(begin, end, width):
            _block(x, weight, bias, activation == RELU, out, scratch, top, bottom, left, min(end, left + width))
    if activation == TANH:
        tanh_columns(out, begin, end)
    if activation == LOGISTIC:
        logistic_columns(out, begin, end)


@inlined
def _block(x, weight, bias, relu, out, scratch, top, bottom, left, right):
    """The part of `out` between rows top and bottom and between columns left and right."""
    k, m, cols, lanes, size = x.shape[1], weight.shape[1], right - left, lanes_of(x), size_of(x)
    panels = panel_count(cols, lanes)
    # One narrow panel may be deeper: rows of x are then read in longer pieces.
    depth = part_size(k, DEPTH * (VECTORS // ((cols + lanes - 1) // lanes) if panels == 1 else 1), CHUNK)
    pack, sums = base(scratch), base(scratch) + DEPTH * PANEL_BYTES
    for k0 in range(0, k, depth):
        steps = min(depth, k - k0)
        first, last = k0 == 0, k0 + steps == k
        for p in range(panels):
            edge, beyond = panel_edge(p, cols, lanes), panel_edge(p + 1, cols, lanes)
            j, wide, stride = left + edge, min(beyond, cols) - edge, beyond - edge
            # What is read next: the panel beside this one, or below the first one, or right of this block.
            row, col = (k0, left + beyond) if p + 1 < panels else (0, right) if last else (k0 + steps, left)
            b, ahead = base(weight) + size * (k0 * m + j), base(weight) + size * (row * m + col)
            for i in range(top, bottom, ROWS):
                rows = min(ROWS, bottom - i)
                a, kept = base(x) + size * (i * k + k0), sums + size * (edge * (bottom - top) + (i - top) * stride)
                s, lds = (base(bias) + size * j, 0) if first else (kept, stride)
                c, ldc = (base(out) + size * (i * m + j), m) if last else (kept, stride)
                # Each tile fetches its share of what comes next until there is no more of it.
                share = (i - top) // ROWS * (depth // CHUNK)
                h, ldh = (ahead + size * share * m, m) if share < depth else (pack, 0)
                if i == top:
                    tile_first(x, a, k, b, m, pack, s, lds, c, ldc, steps, rows, wide, relu and last, h, ldh)
                else:
                    tile_rows(x, a, k, pack, s, lds, c, ldc, steps, rows, wide, relu and last, h, ldh)
