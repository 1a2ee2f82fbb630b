"""Gradients as 32-bit integers on a clip range, so that sums of them are exact in any order.

    q = round(clip(g, -c, c) * 0x7FFFFFFF / c)        g is about q * c / 0x7FFFFFFF

The scaling is done in float64: in float32 the bound 0x7FFFFFFF itself is rounded up to 2^31, which does not fit in int32.
The sum over blocks has 64 bits: a second block already exceeds 32.

Cost: one pass over the array. The error of an element is at most c / 2^32 (c = 10: 2.3e-9), unless it is clipped; the clipped
fraction is returned. Memory: 300 KiB beside the arrays.
Source: the published scheme of coded synchronous SGD (`mpiddl.coding.subset_code`), which clips to [-10, 10].
"""

from __future__ import annotations

import numpy as np

from mpiddl.errors import DataError, ShapeError, UsageError
from mpiddl.layout import pieces
from mpiddl.memory import float_dtype

LARGEST = 0x7FFFFFFF
"""The integer that stands for the clip bound."""

LARGEST_CLIP = 1e290
"""Products with it are finite."""

CLIP = 10.0
"""Clip bound of the published scheme."""

CACHED = 16_384
"""Work goes by parts of so many elements, which stay in the second cache."""


def quantise(gradient: np.ndarray, out: np.ndarray, clip: float = CLIP) -> float:
    """Write the quantised ``gradient`` to ``out``, and return the fraction of its elements that was clipped.

    Parameters
    ----------
    gradient : ndarray, shape (n,), float32 or float64
        Finite numbers; not changed.
    out : ndarray, shape (n,), int32
    clip : float
        Bound c > 0 of the range.

    Raises
    ------
    DataError
        On this rank alone: an element is not finite. ``out`` is then partly written.
    UsageError, ShapeError
        If ``clip`` is not a positive number, or the arrays do not fit.

    Examples
    --------
    >>> out = np.empty(4, np.int32)
    >>> quantise(np.array([0.0, 5.0, -10.0, 12.0]), out), out.tolist()
    (0.25, [0, 1073741824, -2147483647, 2147483647])
    """
    _check(clip, gradient, out, np.int32)
    clipped, spare = 0, np.empty(min(gradient.size, CACHED))
    for part in pieces(gradient.size, CACHED):
        scaled = spare[: part.stop - part.start]
        scaled[:] = gradient[part]
        if not np.isfinite(scaled).all():
            place = part.start + int(np.argmin(np.isfinite(scaled)))
            raise DataError(f"gradient: got {gradient[place]} at element {place}, expected finite numbers")
        clipped += int(np.count_nonzero(np.abs(scaled) > clip))
        np.clip(scaled, -clip, clip, out=scaled)
        scaled *= LARGEST
        scaled /= clip
        np.rint(scaled, out=scaled)
        out[part] = scaled
    return clipped / gradient.size if gradient.size else 0.0


def add_quantised(total: np.ndarray, quantised: np.ndarray) -> None:
    """Add ``quantised`` (n,), int32, to ``total`` (n,), int64. Sums of 2^32 blocks fit.

    Raises
    ------
    ShapeError
        If shapes or dtypes differ from these.

    Examples
    --------
    >>> total = np.full(2, 0x7FFFFFFF)
    >>> add_quantised(total, np.array([0x7FFFFFFF, -1], np.int32))
    >>> total.tolist()
    [4294967294, 2147483646]
    """
    if total.dtype != np.int64 or quantised.dtype != np.int32 or total.shape != quantised.shape:
        raise ShapeError(f"total, quantised: got {total.dtype} of shape {total.shape} and {quantised.dtype} of shape "
                         f"{quantised.shape}, expected int64 and int32 of one shape")
    np.add(total, quantised, out=total)


def dequantise(total: np.ndarray, out: np.ndarray, clip: float = CLIP) -> None:
    """``out`` becomes the real numbers that ``total`` stands for: one block's integers, or the sum of several.

    Parameters
    ----------
    total : ndarray, shape (n,), int32 or int64
    out : ndarray, shape (n,), float32 or float64
        Computed in float64, and then rounded: the same bits on every rank.
    clip : float
        The bound with which the numbers were quantised.

    Raises
    ------
    UsageError, ShapeError
        If ``clip`` is not a positive number, or the arrays do not fit.

    Examples
    --------
    >>> out = np.empty(2)
    >>> dequantise(np.array([4294967294, 0]), out)
    >>> out.tolist()
    [20.0, 0.0]
    """
    _check(clip, out, total, np.int32, np.int64)
    spare = np.empty(min(out.size, CACHED))
    for part in pieces(out.size, CACHED):
        scaled = spare[: part.stop - part.start]
        np.multiply(total[part], clip, out=scaled)
        np.divide(scaled, LARGEST, out=out[part], casting="same_kind")


def _check(clip: float, real: np.ndarray, whole: np.ndarray, *kinds: type[np.signedinteger]) -> None:
    """Raise unless ``whole`` is of one of the ``kinds`` and as long as the float array ``real``."""
    if not 0 < clip <= LARGEST_CLIP:
        raise UsageError(f"clip: got {clip!r}, expected a number > 0 and at most {LARGEST_CLIP:g}")
    float_dtype(real.dtype)
    if whole.dtype not in kinds or real.ndim != 1 or whole.shape != real.shape:
        wanted = " or ".join(np.dtype(kind).name for kind in kinds)
        raise ShapeError(f"quantised: got {whole.dtype} of shape {whole.shape} beside {real.dtype} of shape {real.shape}, "
                         f"expected {wanted} of the same shape (n,)")
