"""SciPy's sparse matrices, checked before compiled code takes their numbers of rows and columns for places in memory.

SciPy's constructors check only the lengths of the arrays, and ``check_format`` skips a matrix whose last pointer is 0.
Cost: one pass over the index arrays. The values are not read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import DataError

MOST_COLUMNS = 2**31 - 1
"""Kernels take numbers of columns as int32."""


def checked_csr(x: Any, name: str) -> Any:
    """A matrix of any of SciPy's formats in CSR, on the same arrays where they are in CSR already; ``x`` stays as it is.

    Raises
    ------
    DataError
        If it is damaged: an index outside of the shape, pointers that are too few, too many or that decrease, indices that are
        no integers. Indices that are not sorted and duplicates are no damage.
    """
    if x.ndim != 2:
        raise DataError(f"{name}: got a sparse array of shape {x.shape}, expected rows and columns")
    if x.shape[1] > MOST_COLUMNS:
        raise DataError(f"{name}: got a sparse matrix of {x.shape[1]} columns, expected at most {MOST_COLUMNS}")
    try:
        return _made_anew(x, name).tocsr()
    except DataError:
        raise
    except (ValueError, TypeError, IndexError, ArithmeticError) as error:  # SciPy's, of coordinates and diagonals
        raise DataError(f"{name}: the sparse matrix is damaged ({error})") from None


def _made_anew(x: Any, name: str) -> Any:
    """The same matrix, checked. SciPy's flags about the indices are dropped, because the indices may have changed since."""
    kind = type(x)
    if x.format in ("csr", "csc", "bsr"):
        _check_pointers(x, name)
        return kind((x.data, x.indices, x.indptr), shape=x.shape)
    if x.format == "coo":
        return kind((x.data, (x.row, x.col)), shape=x.shape)
    if x.format == "dia":
        return kind((x.data, x.offsets), shape=x.shape)
    return _made_anew(x.tocsr(), name)


def _check_pointers(x: Any, name: str) -> None:
    """Raise unless ``indptr`` and ``indices`` point to what is there: rows, columns, or blocks of them."""
    blocks = getattr(x, "blocksize", (1, 1))
    if any(size % block for size, block in zip(x.shape, blocks, strict=True)):
        raise DataError(f"{name}: got blocks of shape {blocks}, expected blocks that fill the shape {x.shape}")
    lines, most = (size // block for size, block in zip(x.shape, blocks, strict=True))
    if x.format == "csc":
        lines, most = most, lines
    what = f"for a {x.format.upper()} matrix of shape {x.shape}"
    pointers, indices = x.indptr, x.indices
    for word, array in (("indptr", pointers), ("indices", indices)):
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise DataError(f"{name}: {word}: got {array.dtype} of shape {array.shape}, expected integers in one dimension")
    if len(pointers) != lines + 1:
        raise DataError(f"{name}: indptr: got {len(pointers)} numbers, expected {lines + 1} {what}")
    stored = min(len(indices), len(x.data))
    if pointers[0] != 0 or pointers[-1] > stored:
        raise DataError(f"{name}: indptr: got numbers from {pointers[0]} to {pointers[-1]}, expected numbers from 0 to at most "
                        f"{stored}, the number of stored values")
    falling = np.flatnonzero(pointers[1:] < pointers[:-1])
    if falling.size:
        before, after = pointers[falling[0] :][:2]
        raise DataError(f"{name}: indptr: got {after} after {before}, expected numbers that never decrease")
    used = indices[: pointers[-1]]
    unsigned = used.view(used.dtype.str.replace("i", "u"))  # negative numbers become large ones: one pass finds both
    if used.size and int(unsigned.max()) >= most:
        raise DataError(f"{name}: indices: got {used[unsigned.argmax()]}, expected 0 to {most - 1} {what}")
