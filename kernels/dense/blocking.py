"""How matrices are cut up for the caches: 32 KB (first) and 1 MB (second) per core are assumed.

The bits of a result depend on none of these numbers (see `tile`). Each function is plain Python outside of kernels.
"""

from __future__ import annotations

from numba.extending import register_jitable

from mpiddl.kernels.dense.tile import VECTORS
from mpiddl.kernels.lanes import WIDTH

PANEL_BYTES = VECTORS * WIDTH
"""A row of a full panel: the width of a tile."""


@register_jitable
def round_up(n, unit):
    """The least multiple of `unit` that is not below n."""
    return (n + unit - 1) // unit * unit


@register_jitable
def part_size(n, largest, unit):
    """Size, a multiple of `unit`, of the equal parts that n is cut into; none is above both `largest` and `unit`."""
    largest = max(unit, largest // unit * unit)
    parts = max(1, (n + largest - 1) // largest)
    return max(unit, round_up((n + parts - 1) // parts, unit))


@register_jitable
def panel_count(cols, lanes):
    """How many panels `cols` columns are cut into."""
    return ((cols + lanes - 1) // lanes + VECTORS - 1) // VECTORS


@register_jitable
def panel_edge(p, cols, lanes):
    """First column of panel p; behind the last panel, `cols` rounded up to whole vectors.

    Panels are as equal as whole vectors allow: 64 columns of 16 lanes are two panels of 32, not one of 48 and a slow
    one of 16.
    """
    return (cols + lanes - 1) // lanes * p // panel_count(cols, lanes) * lanes
