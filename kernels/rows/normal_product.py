"""x.T @ (x @ w) for a few columns w, reading x once; 4 n d k operations.

A block of rows small enough for the second cache is taken through both products before the next one is read, so x comes from
memory once where two products of a library read it twice. Centring, row weights and the moments of the columns ride
along. Sums over many rows are carried in float64, whatever the dtype of x.
"""

from __future__ import annotations

from numba.extending import register_jitable

from mpiddl.kernels.jit import inlined, kernel
from mpiddl.kernels.lanes import UNIT, base, size_of, unit_of
from mpiddl.kernels.rows.row_moments import ROWS, row_moments
from mpiddl.kernels.rows.thin import HEIGHT, fetch, thin_columns, thin_rows

_HEIGHTS = (0, *HEIGHT.values())
MOST_UNITS = max(HEIGHT)

BLOCK = 24
"""Rows of a block; 12 to 48 are as good, 96 and more lose 5 to 20 % from a thousand columns on (measured)."""

DEPTH = 4096
"""Columns of x taken at a time, so that their rows of w stay in the second cache."""

SHORT_ROW = 2048
"""Bytes of a row up to which the processor does not see by itself what is read next; asking makes a pass over rows of 1 KiB
23 % faster (measured), and one over longer ones no faster."""

FLUSH = 2048
"""Rows whose sum is carried in the dtype of x: the rounding of longer float32 sums would show."""


@register_jitable
def padded_columns(k, itemsize):
    """`k` rounded up to whole units of that many bytes an element: the columns that `normal_product` takes."""
    lanes = UNIT // itemsize
    return (k + lanes - 1) // lanes * lanes


def normal_scratch(d: int, columns: int, itemsize: int) -> int:
    """Elements of scratch memory that `normal_product` needs."""
    return 2 * BLOCK * columns + d * (columns + 2) + 1


@kernel
def normal_product(x, w, start, weights, origin, out, sums, moments, squares, scratch):
    """out += x.T @ y and sums += the sum of y's rows, with y = weights[:, None] * (x @ w + start).

    x (n, d), w (d, k), start (k,), origin (d,) and `scratch` (`normal_scratch`) are C-contiguous and of one float dtype; k is
    a multiple of the lanes of a unit (`padded_columns`). weights (n,) of that dtype, or empty: ones. out (d, k) and sums (k,)
    are float64. moments, float64, is (2, d) and gets the weighted sums of x - origin and of its squares, or (0, d).
    squares (n,), or (0,) without moments, is overwritten by weights |x - origin|^2 of the rows.
    """
    n, d = x.shape
    k, size = w.shape[1], size_of(x)
    carried = scratch[2 * BLOCK * k : 2 * BLOCK * k + d * k]
    column = scratch[2 * BLOCK * k + d * k : 2 * BLOCK * k + d * (k + 2)]
    one = scratch[2 * BLOCK * k + d * (k + 2) :]
    for top in range(0, n, FLUSH):
        bottom = min(n, top + FLUSH)
        carried[:] = 0
        column[:] = 0
        for t in range(top, bottom, BLOCK):
            under, left = min(bottom, t + BLOCK), 0
            ahead = base(x) + size * under * d if size * d <= SHORT_ROW else 0
            while left < k:
                units = panel_units(k - left, unit_of(x))
                add_normal(x, w, start, weights, base(carried) + size * left, sums, scratch, t, under, left, units, ahead)
                left += units * unit_of(x)
            if moments.shape[0]:
                _add_moments(x, origin, weights, column, one, squares, t, under)
        for j in range(d):
            for c in range(k):
                out[j, c] += carried[j * k + c]
        for i in range(moments.shape[0]):
            for j in range(d):
                moments[i, j] += column[i * d + j]


@inlined
def _add_moments(x, origin, weights, column, one, squares, top, bottom):
    """The sums and sums of squares of x - origin, by columns and by rows, rows top to bottom, while they are in the cache."""
    d, size, first = x.shape[1], size_of(x), base(column)
    one[0] = 1
    for i in range(top, bottom, ROWS):
        factors, step = (base(weights) + size * i, 1) if weights.size else (base(one), 0)
        rows = min(ROWS, bottom - i)
        found = row_moments(x, base(x) + size * i * d, d, rows, base(origin), first, first + size * d, factors, step, d)
        for r in range(rows):
            squares[i + r] = found[r] * (weights[i + r] if weights.size else 1)


@register_jitable
def panel_units(cols, lanes, most=MOST_UNITS):
    """How many units of so many lanes the next panel of columns has, at most `most`: as equal as whole units allow."""
    units = cols // lanes
    panels = (units + most - 1) // most
    return (units + panels - 1) // panels


@inlined
def add_normal(x, w, start, weights, target, sums, scratch, top, bottom, left, units, ahead):
    """For a block of rows and one panel of columns: the sums of `normal_product`, the product's to the address `target`.

    Rows `ahead`, an address other than 0, are asked for meanwhile, as many as these.
    """
    d, k, size, width, rows = x.shape[1], w.shape[1], size_of(x), units * unit_of(x), bottom - top
    y, height = base(scratch), _HEIGHTS[units]
    for j in range(0, d, DEPTH):
        for i in range(0, rows, height):
            a, line = base(x) + size * ((top + i) * d + j), y + size * i * width
            s, lds = (base(start) + size * left, 0) if j == 0 else (line, width)
            b = base(w) + size * (j * k + left)
            thin_rows(x, units, a, d, b, k, s, lds, line, width, min(DEPTH, d - j), min(height, rows - i))
    for i in range(rows):
        factor = weights[top + i] if weights.size else x.dtype.type(1)
        for c in range(width):
            value = scratch[i * width + c] * factor
            scratch[i * width + c] = value
            sums[left + c] += value
    # While this block is multiplied from the cache, the next one comes from memory: a share of it for each tile.
    share = (rows * size * height + 63) // 64 if ahead else 0
    for j in range(0, d, height):
        place, coming = target + size * j * k, ahead + 64 * share * (j // height)
        fetch(x, coming, share)
        thin_columns(x, units, base(x) + size * (top * d + j), d, y, width, place, k, place, k, rows, min(height, d - j))
