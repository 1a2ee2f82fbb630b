"""A matrix of cosines and sines of which any m columns are invertible, and well conditioned.

    row      odd m     1, sqrt 2 cos t, sqrt 2 sin t, sqrt 2 cos 2t, sqrt 2 sin 2t ...
             even m    sqrt 2 cos t/2, sqrt 2 sin t/2, sqrt 2 cos 3t/2, sqrt 2 sin 3t/2 ...
    column   t = 0, 1/n, 2/n ... (n-1)/n of a full turn

A combination of the rows, with factors that are not all 0, is a polynomial of degree m - 1 in exp(i t), times a function
without zeros. So it has at most m - 1 zeros in one turn, and any m columns are linearly independent. A Vandermonde matrix of n
real points has that property too, but its condition grows exponentially with n. Largest condition number of m columns:

===============================  ====  ====  =====  ======
n, m                             4, 2  8, 3  10, 5  16, 8
===============================  ====  ====  =====  ======
this matrix                      2.4   12    42     1,060
Chebyshev polynomials and nodes  5.0   130   1,920  1.3e6
===============================  ====  ====  =====  ======

Sources: harmonic frames, Casazza & Kovacevic, Equal-norm tight frames with erasures, Adv. Comput. Math. 18, 2003; the circle in
place of real points, in other codes for stragglers, Ramamoorthy & Tang, arXiv:1910.06515.
"""

from __future__ import annotations

from math import cos, pi, sin, sqrt

import numpy as np

ROUNDED = 2.0**20
"""Entries are multiples of 1/ROUNDED: the same on machines whose cosines differ in the last bit, and exact in float32."""


def harmonic_frame(columns: int, rows: int) -> np.ndarray:
    """The matrix: ndarray, shape (rows, columns), float64; 1 <= rows <= columns. All columns have the norm sqrt(rows).

    Examples
    --------
    >>> harmonic_frame(3, 1).tolist(), harmonic_frame(4, 2).round(3).tolist()
    ([[1.0, 1.0, 1.0]], [[1.414, 1.0, 0.0, -1.0], [0.0, 1.0, 1.414, 1.0]])
    """
    found = np.ones((rows, columns))
    for pair in range(rows // 2):
        frequency = pair + (1.0 if rows % 2 else 0.5)
        for column in range(columns):
            turn = 2 * pi * frequency * column / columns
            found[rows % 2 + 2 * pair :][:2, column] = sqrt(2) * cos(turn), sqrt(2) * sin(turn)
    return np.round(found * ROUNDED) / ROUNDED
