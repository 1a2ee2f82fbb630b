"""Whether rows that a model is applied to are on the scale of its training rows: bytes are scaled to 0..1, floats are not.

A checkpoint's manifest tells the largest number of the training rows (``largest``), and whether training rows were bytes
(``bytes``). Manifests of earlier versions do not, and nothing is said about such models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

UNIT = 1.001
"""Training rows up to 1, with room for rounding, were scaled to it: in images, all of them."""

FAR = 10.0
"""Beyond this, rows are not on the scale of such training rows. Training rows that are larger have no usual bounds."""


def magnitude(x: np.ndarray) -> float:
    """The largest number of ``x`` without its sign; 0 where there is none, NaN left as it is."""
    if not x.size or x.dtype.kind not in "buif":
        return 0.0
    return max(abs(float(x.max())), abs(float(x.min())))


def scale_note(data: Mapping[str, Any], largest: float, of_bytes: bool) -> str:
    """A sentence if rows are not on the scale of the training rows; else nothing.

    Parameters
    ----------
    data : mapping
        What a manifest says about the training data.
    largest : float
        Magnitude of the rows as they came.
    of_bytes : bool
        They are uint8, which is scaled by 1/255.

    Examples
    --------
    >>> scale_note({"largest": 1.0, "bytes": True}, 255.0, of_bytes=False)
    'x: got numbers up to 255, expected uint8 rows or numbers from 0 to 1: the training rows were uint8, scaled by 1/255'
    >>> scale_note({"largest": 1.0, "bytes": True}, 1.0, of_bytes=False)
    ''
    """
    trained = data.get("largest")
    if trained is None:
        return ""
    if of_bytes:
        if data["bytes"] or trained <= FAR or largest <= UNIT:
            return ""
        return (f"x: got uint8 rows, which are scaled by 1/255, expected numbers up to {trained:g}: the training rows were not "
                "scaled; convert them first, as x.astype('float32')")
    if trained > UNIT or not largest > FAR:
        return ""
    if data["bytes"]:
        return (f"x: got numbers up to {largest:g}, expected uint8 rows or numbers from 0 to 1: the training rows were uint8, "
                "scaled by 1/255")
    return f"x: got numbers up to {largest:g}, expected the scale of the training rows, which have numbers up to {trained:g}"
