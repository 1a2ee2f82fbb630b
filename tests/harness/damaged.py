"""Sparse matrices that are damaged, and such that only look so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse


def put(array: np.ndarray, place: int, value: int) -> np.ndarray:
    array = array.copy()
    array[place] = value
    return array


DAMAGES: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray], str]] = {
    "an index too large": ("indices", lambda indices: put(indices, 3, 20), "indices: got 20, expected 0 to 19"),
    "an index far too large": ("indices", lambda indices: put(indices, -1, 10**9), "indices: got 1000000000"),
    "a negative index": ("indices", lambda indices: put(indices, 3, -1), "indices: got -1, expected 0 to 19"),
    "fewer indices than values": ("indices", lambda indices: indices[:-1], "indptr: got numbers .* at most"),
    "fewer values than indices": ("data", lambda data: data[:-1], "indptr: got numbers .* at most"),
    "indices of floats": ("indices", lambda indices: indices + 0.5, "indices: got float64"),
    "indices in two dimensions": ("indices", lambda indices: indices[:, None], r"indices: got int32 of shape \("),
    "pointers that decrease": ("indptr", lambda indptr: put(indptr, 7, 10**6), "indptr: got .* after 1000000, expected"),
    "pointers that begin late": ("indptr", lambda indptr: put(indptr, 0, 1), "indptr: got numbers from 1"),
    "a last pointer too large": ("indptr", lambda indptr: put(indptr, -1, 10**6), "indptr: got numbers from 0 to 1000000"),
    "a negative last pointer": ("indptr", lambda indptr: put(indptr, -1, -1), "indptr: got -1 after"),
    "a last pointer of 0": ("indptr", lambda indptr: put(indptr, -1, 0), "indptr: got 0 after"),
    "too few pointers": ("indptr", lambda indptr: indptr[:-1], "indptr: got 60 numbers, expected 61"),
    "too many pointers": ("indptr", lambda indptr: np.append(indptr, indptr[-1]), "indptr: got 62 numbers"),
    "pointers of floats": ("indptr", lambda indptr: indptr * 1.0, "indptr: got float64"),
}
"""Of a CSR matrix of 60 rows and 20 columns: which of its arrays, what is done to it, and what the error says."""


def reversed_rows(data: Any, indices: Any, indptr: Any) -> tuple[Any, Any, Any]:
    order = np.concatenate([np.arange(end - 1, begin - 1, -1) for begin, end in pairwise(indptr)])
    return data[order], indices[order], indptr


def halves(data: Any, indices: Any, indptr: Any) -> tuple[Any, Any, Any]:
    return np.repeat(data, 2) * np.tile([0.25, 0.75], len(data)), np.repeat(indices, 2), 2 * indptr


LEGAL: dict[str, Callable[[Any, Any, Any], tuple[Any, Any, Any]]] = {
    "not sorted": reversed_rows,
    "duplicates": halves,
    "int64": lambda data, indices, indptr: (data, indices.astype(np.int64), indptr.astype(np.int64)),
    "unsigned": lambda data, indices, indptr: (data, indices.astype(np.uint32), indptr.astype(np.uint16)),
    "another byte order": lambda data, indices, indptr: (data, indices.astype(">i4"), indptr.astype(">i8")),
    "room at the end": lambda data, indices, indptr: (np.append(data, np.nan), np.append(indices, 99), indptr),
}
"""What is done to the arrays of a matrix that stays the same."""


def rows_with_gaps(seed: int = 0) -> np.ndarray:
    """60 x 20, sparse, with a row without entries."""
    rng = np.random.default_rng(seed)
    x = np.where(rng.random((60, 20)) < 0.3, rng.standard_normal((60, 20)), 0) * (1 + np.arange(20)) ** -0.5
    x[11] = 0
    return x


def with_change(x: Any, name: str) -> Any:
    """The CSR matrix ``x`` with its arrays changed afterwards, so that what SciPy has noted of them may no longer hold."""
    assert x.has_canonical_format
    x.data, x.indices, x.indptr = changed(x, name)
    return x


def changed(x: Any, name: str) -> tuple[Any, Any, Any]:
    """The arrays of a CSR matrix after what `DAMAGES` or `LEGAL` have under that name."""
    if name in LEGAL:
        return LEGAL[name](x.data, x.indices, x.indptr)
    array, make, _ = DAMAGES[name]
    return tuple(make(getattr(x, each)) if each == array else getattr(x, each) for each in ("data", "indices", "indptr"))


def damaged_coordinates() -> Iterator[tuple[str, Any]]:
    """Matrices in other formats than CSR, each with an index out of the shape."""
    for form, array in (("csc", "indices"), ("bsr", "indices"), ("coo", "col"), ("coo", "row")):
        for value in (10**6, -1):
            x = scipy.sparse.csr_array(rows_with_gaps()).asformat(form)
            setattr(x, array, put(getattr(x, array), 2, value))
            yield f"{form} {array} {value}", x
    x = scipy.sparse.csr_array(rows_with_gaps()).tolil()
    x.rows[3].append(20)
    x.data[3].append(1.0)
    yield "lil", x
