from __future__ import annotations

import numpy as np

from .jit import kernel
from .lanes import WIDTH
from .panels import RELU, TANH, copy_panel, transpose_panel, transpose_times_slope
from .tile import BIAS, CHUNK, RESUME, ROWS, VECTORS, ZERO, tile_columns, tile_first, tile_rows
from .tile import RELU as MAX0

DEPTH = 128
BLOCK = 64
COLS = 384
PFF = 1
PFW = 1
PFI = 1
DIRECTA = 0
def scratch_size(rows, inputs, outputs, itemsize):
    lanes = WIDTH // itemsize
    up = lambda n: -(-n // lanes) * lanes
    return max(DEPTH * VECTORS * lanes, rows * BLOCK + lanes + rows * up(outputs), (BLOCK + outputs) * up(rows))


@kernel
def forward(x, weight, bias, activation, out, pack):
    n, k = x.shape
    m = weight.shape[1]
    lanes = WIDTH // x.itemsize
    xf, wf, of = x.reshape(-1), weight.reshape(-1), out.reshape(-1)
    vectors = (m + lanes - 1) // lanes
    panels = (vectors + VECTORS - 1) // VECTORS
    for r0 in range(0, n, 256):
        r1 = min(n, r0 + 256)
        for k0 in range(0, k, DEPTH):
            depth = min(DEPTH, k - k0)
            mode = RESUME if k0 else BIAS
            if activation == RELU and k0 + depth == k:
                mode += MAX0
            for p in range(panels):
                j = vectors * p // panels * lanes
                cols = min(m, vectors * (p + 1) // panels * lanes) - j
                nj = vectors * (p + 1) // panels * lanes
                nk = k0
                if p + 1 == panels:
                    nj = 0
                    nk = k0 + DEPTH
                h0 = nk * m + nj
                left = min(DEPTH, k - nk)
                q = 0
                per = (depth + CHUNK - 1) // CHUNK
                for i in range(r0, r1, ROWS):
                    ldh = m if q < left and PFF else 0
                    at = h0 + q * m if q < left else 0
                    if i == r0:
                        tile_first(xf, i * k + k0, k, wf, k0 * m + j, m, pack, 0, depth, of, i * m + j, m, min(ROWS, r1 - i), cols, bias, j, mode, wf, at, ldh)
                    else:
                        tile_rows(xf, i * k + k0, k, pack, 0, depth, of, i * m + j, m, min(ROWS, r1 - i), cols, bias, j, mode, wf, at, ldh)
                    q += per
    if activation == TANH:
        for i in range(of.size):
            of[i] = np.tanh(of[i])

@kernel
def weight_gradient(x, delta, grad_weight, grad_bias, pack):
    n, k = x.shape
    m = delta.shape[1]
    lanes = WIDTH // x.itemsize
    vectors = (m + lanes - 1) // lanes
    panels = (vectors + VECTORS - 1) // VECTORS
    xf, df, gf = x.reshape(-1), delta.reshape(-1), grad_weight.reshape(-1)
    b0 = n * BLOCK + lanes
    wide = vectors * lanes
    for k0 in range(0, n, DEPTH):
        depth = min(DEPTH, n - k0)
        for p in range(panels):
            j = vectors * p // panels * lanes
            j1 = vectors * (p + 1) // panels * lanes
            copy_panel(df, k0 * m + j, m, depth, min(m, j1) - j, pack, b0 + k0 * wide + j * depth, j1 - j)
    whole = k // ROWS * ROWS
    for i0 in range(0, k, BLOCK):
        i1 = min(k, i0 + BLOCK)
        for i in range(i0, i1, ROWS):
            if not DIRECTA or i == whole:
                copy_panel(xf, i, k, n, min(ROWS, i1 - i), pack, (i - i0) * n, ROWS)
        for p in range(panels):
            j = vectors * p // panels * lanes
            cols = min(m, vectors * (p + 1) // panels * lanes) - j
            for k0 in range(0, max(n, 1), DEPTH):
                depth = min(DEPTH, n - k0)
                q = b0 + k0 * wide + j * depth
                mode = RESUME if k0 else ZERO
                for i in range(i0, i1, ROWS):
                    rows = min(ROWS, i1 - i)
                    at, ldh = ((i + ROWS) * m + j, m) if PFW and k0 == 0 else (0, 0)
                    if not DIRECTA or i == whole:
                        tile_columns(pack, (i - i0) * n + k0 * ROWS, ROWS, pack, q, depth, gf, i * m + j, m, rows, cols, mode, gf, at, ldh)
                    else:
                        tile_columns(xf, i + k0 * k, k, pack, q, depth, gf, i * m + j, m, rows, cols, mode, gf, at, ldh)
    for j in range(m):
        grad_bias[j] = 0
    for i in range(n):
        for j in range(m):
            grad_bias[j] += delta[i, j]

@kernel
def input_gradient(delta, weight, activation, hidden, pack):
    n, m = delta.shape
    k = weight.shape[0]
    lanes = WIDTH // delta.itemsize
    df, wf, hf = delta.reshape(-1), weight.reshape(-1), hidden.reshape(-1)
    vectors = (n + lanes - 1) // lanes
    panels = (vectors + VECTORS - 1) // VECTORS
    tall = vectors * lanes
    b0 = BLOCK * tall
    for p in range(panels):
        j = vectors * p // panels * lanes
        j1 = vectors * (p + 1) // panels * lanes
        for k0 in range(0, m, DEPTH):
            depth = min(DEPTH, m - k0)
            transpose_panel(df, j * m + k0, m, min(n, j1) - j, depth, pack, b0 + k0 * tall + j * depth, j1 - j)
    for i0 in range(0, k, BLOCK):
        i1 = min(k, i0 + BLOCK)
        for k0 in range(0, m, DEPTH):
            depth = min(DEPTH, m - k0)
            for p in range(panels):
                j = vectors * p // panels * lanes
                cols = min(n, vectors * (p + 1) // panels * lanes) - j
                for i in range(i0, i1, ROWS):
                    at = i * m + k0 + DEPTH + p * VECTORS * lanes
                    tile_rows(wf, i * m + k0, m, pack, b0 + k0 * tall + j * depth, depth, pack, (i - i0) * tall + j, tall, min(ROWS, i1 - i), cols, pack, 0, RESUME if k0 else ZERO, wf, at, m if PFI else 0)
        transpose_times_slope(pack, 0, tall, i1 - i0, n, hf, i0, k, activation)
