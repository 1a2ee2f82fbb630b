"""Which solver is the fastest for the shapes at hand, by counting operations, and why in words."""

from __future__ import annotations

from math import ceil, log10
from typing import NamedTuple

SMALL = 64
"""Columns, or rows, up to which nothing beats the direct way."""

PASS_RATE, GRAM_RATE, EIGEN_RATE = 85e9, 75e9, 4e9
"""Operations a second of a core, by which costs are compared: products with a thin block, products with itself, eigenvectors.
Measured with AVX2 in float32 (docs/decomposition.md); only their ratios matter."""

SUBSAMPLE_MOST = 2500
"""Columns up to which a sample's covariance stays in the third cache."""


class Choice(NamedTuple):
    """A solver and the reason for it."""

    solver: str
    why: str


def choose(n: int, d: int, k: int, columns: int, tol: float, ranks: int, sparse: bool = False) -> Choice:
    """The solver for ``n`` rows of ``d`` columns on ``ranks`` ranks, ``k`` components by blocks of ``columns``.

    Examples
    --------
    >>> choose(60_000, 784, 10, 16, 1e-8, 1).solver, choose(20_000, 20_000, 10, 16, 1e-8, 1).solver
    ('subsample', 'krylov')
    """
    least = min(n, d)
    if least <= SMALL or 3 * columns >= least:
        return Choice("gram", f"{k} of min(n, d) = {least}: the direct way costs least")
    one = 4 * n / ranks * d * columns / PASS_RATE
    costs = {"krylov": (0.2 + _passes(tol, 2.1)) * one}
    if not sparse:
        costs["gram"] = n / ranks * d * least / GRAM_RATE + least**3 / EIGEN_RATE
    if d <= SUBSAMPLE_MOST and n >= 8 * d and not sparse:
        sample = sample_rows(n, d, columns)
        costs["subsample"] = _passes(tol, 3.7) * one + sample / ranks * d**2 / GRAM_RATE
    best = min(costs, key=lambda name: costs[name])
    told = ", ".join(f"{name} {cost:.3g} s" for name, cost in sorted(costs.items(), key=lambda item: item[1]))
    return Choice(best, f"estimated for {n} x {d}, {k} components to {tol:g}: {told}")


def sample_rows(n: int, d: int, columns: int) -> int:
    """Rows of a sample whose covariance costs about half a pass, and tells something of all its directions."""
    return min(n, max(min(n // 8, 3 * n * columns // d), 2 * columns, 256, min(d, n // 4)))


def start_rows(n: int, d: int, columns: int) -> int:
    """Rows of a sample on which four passes cost a sixth of a pass."""
    return min(n, max(n // 24, 8 * columns, 256))


def _passes(tol: float, decades: float) -> float:
    """Passes to ``tol``: a warm start is worth three decades of explained variance, a pass so many more, and the last one is
    only a look at a sample. Measured on spectra that fall by a power (docs/decomposition.md); tight gaps need more, of all
    solvers alike."""
    return 1.1 + max(0, ceil((-log10(max(tol, 1e-15)) - 3) / decades) - 1)
