"""Components without variance: any orthonormal basis of what the others leave will do, and rounding would choose one.

So that it depends only on what the others span, it is made from unit vectors: the one that is farthest from the span, less its
projection, joins the span, and so on: a Cholesky factorisation of the projector, with pivoting. Then rows that count twice
and rows that come twice give the same components, with any solver and on any number of ranks.

Cost: 4 d k operations for each component without variance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

ROUNDING = 1e-14
"""Of the largest variance: what is smaller is rounding in float64."""

ALIKE = 1e-6
"""Unit vectors whose distances from the span differ by less are alike: the first of them is taken."""


def completed(result: Any, k: int) -> Any:
    """A `Result` of ``k`` components: those that have a variance, and a basis of what they leave."""
    sound = int((result.values > ROUNDING * result.values.max(initial=0.0)).sum())
    if sound == k:
        return result
    padding = np.zeros(k - sound)
    values, errors = (np.append(each[:sound], padding) for each in (result.values, result.errors))
    return replace(result, components=_complete(result.components[:sound], k), values=values, errors=errors)


def _complete(components: np.ndarray, k: int) -> np.ndarray:
    """``k`` orthonormal rows, of which the first are ``components``."""
    have, d = components.shape
    basis = np.empty((k, d))
    basis[:have] = components
    distance = 1 - np.einsum("ij,ij->j", components, components)
    for row in range(have, k):
        nearest = int(np.argmax(distance >= (1 - ALIKE) * distance.max()))
        new = np.zeros(d)
        new[nearest] = 1.0
        for _ in range(2):  # the second time against rounding
            new -= basis[:row].T @ (basis[:row] @ new)
        new /= np.linalg.norm(new)
        basis[row] = new * np.sign(new[np.abs(new).argmax()])
        distance -= new**2
    return basis
