"""The alpha-beta model of a collective: seconds = alpha + beta bytes.

Source: R. Hockney, Parallel Computing 20, 1994, doi:10.1016/S0167-8191(06)80021-9. Departure: alpha and beta hold for one
algorithm on one node map, so that rounds and ranks are in them already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Line(NamedTuple):
    """``alpha`` seconds, ``beta`` seconds a byte."""

    alpha: float
    beta: float

    def __call__(self, nbytes: float) -> float:
        return self.alpha + self.beta * nbytes


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line with the least squares of relative errors, neither number below zero.

    Examples
    --------
    >>> line = fit([1000, 2000, 4000], [3e-6, 5e-6, 9e-6])
    >>> round(line.alpha * 1e6, 6), round(line.beta * 1e9, 6)
    (1.0, 2.0)
    """
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    columns = np.column_stack([np.ones_like(x), x]) / y[:, None]
    (alpha, beta), *_ = np.linalg.lstsq(columns, np.ones_like(x), rcond=None)
    if len(x) < 2 or beta < 0:
        return Line(float(np.exp(np.log(y).mean())), 0.0)
    if alpha < 0:
        return Line(0.0, float((x / y).sum() / ((x / y) ** 2).sum()))
    return Line(float(alpha), float(beta))
