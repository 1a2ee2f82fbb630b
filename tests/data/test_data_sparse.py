"""Sparse matrices are checked before compiled code takes their indices: each damage is an error, what is legal is not."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from harness.damaged import DAMAGES, LEGAL, damaged_coordinates, rows_with_gaps, with_change

from mpiddl.data.sparse import checked_csr
from mpiddl.errors import DataError

pytestmark = pytest.mark.no_mpi


@pytest.mark.parametrize("kind", [scipy.sparse.csr_array, scipy.sparse.csr_matrix])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damages_are_named(damage, kind):
    message = DAMAGES[damage][2]
    with pytest.raises(DataError, match=message):
        checked_csr(with_change(kind(rows_with_gaps()), damage), "X")


@pytest.mark.parametrize("kind", [scipy.sparse.csr_array, scipy.sparse.csr_matrix])
@pytest.mark.parametrize("change", LEGAL)
def test_what_is_legal_stays_the_same_matrix(change, kind):
    whole = rows_with_gaps()
    x = with_change(kind(whole), change)
    before = [array.copy() for array in (x.data, x.indices, x.indptr)]
    found = checked_csr(x, "X")
    assert found.has_canonical_format == (change not in ("not sorted", "duplicates"))
    found = found.copy()
    found.sum_duplicates()
    np.testing.assert_allclose(found.toarray(), whole, rtol=1e-15)
    assert type(found) is kind and found.nnz == np.count_nonzero(whole)
    for now, then in zip((x.data, x.indices, x.indptr), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_indices_of_other_formats():
    for name, x in damaged_coordinates():
        with pytest.raises(DataError, match=r"^X: "):
            pytest.fail(f"{name}: {checked_csr(x, 'X')!r}")


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "bsr", "dia", "lil", "dok"])
def test_every_format(form):
    whole = rows_with_gaps()
    np.testing.assert_array_equal(checked_csr(scipy.sparse.csr_array(whole).asformat(form), "X").toarray(), whole)


def test_arrays_are_not_copied():
    x = scipy.sparse.csr_array(rows_with_gaps())
    found = checked_csr(x, "X")
    assert all(np.shares_memory(getattr(found, name), getattr(x, name)) for name in ("data", "indices", "indptr"))


def test_shapes_that_no_kernel_takes():
    with pytest.raises(DataError, match="4294967296 columns, expected at most 2147483647"):
        checked_csr(scipy.sparse.csr_array((3, 2**32)), "X")
    with pytest.raises(DataError, match=r"blocks of shape \(3, 2\)"):
        checked_csr(odd_blocks(), "X")


def odd_blocks():
    x = scipy.sparse.bsr_array(np.ones((6, 4)), blocksize=(3, 2))
    x._shape = (7, 4)
    return x
