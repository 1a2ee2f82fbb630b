"""Rows that are hard for floating point, and input or settings that make no sense."""

from __future__ import annotations

import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import scipy.sparse
from harness.damaged import DAMAGES, LEGAL, damaged_coordinates, rows_with_gaps, with_change
from harness.matrices import DTYPES, SOLVERS, exact, mine, rows_of_all
from harness.tiers import more

from mpiddl.decomposition import PCA, TruncatedSVD
from mpiddl.decomposition.rows.dense import DenseRows
from mpiddl.errors import DataError, MismatchError, MpiddlError
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi


@pytest.mark.mpi
def test_sparse_rows_that_make_no_sense(comm):
    x = scipy.sparse.csr_array(np.eye(30))
    with pytest.raises(ValueError, match="solver: got vr for sparse rows"):
        PCA(2, solver="vr", comm=comm).fit(x)
    x.data[7] = np.nan
    with pytest.raises(ValueError, match="Input X contains NaN: row 7, column 7"):
        PCA(2, comm=comm).fit(x)


@pytest.mark.mpi
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("value", [0.0, more(7.0), more(0.1), 288.15])
@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_rows_have_no_variance(comm, solver, value, dtype):
    pca = PCA(2, solver=solver, random_state=0, comm=comm).fit(np.full((200, 90), value, dtype))
    np.testing.assert_allclose(pca.explained_variance_, 0, atol=1e-20)
    np.testing.assert_allclose(pca.components_ @ pca.components_.T, np.eye(2), atol=max(1e-8, np.finfo(dtype).eps))
    np.testing.assert_array_equal(pca.explained_variance_ratio_, 0)


@pytest.mark.mpi
@pytest.mark.parametrize("solver", ["auto", "gram", "subsample", "vr", "krylov"])
@pytest.mark.parametrize("value", [more(1e20), 9.969e36, more(1e90), 1e150])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_fill_values_among_the_rows(comm, solver, value):
    x = rows_of_all(8000, 60)
    x[np.random.default_rng(9).random(len(x)) < 0.004, 5] = value
    pca = PCA(3, solver=solver, tol=1e-6, random_state=0, comm=comm, threads=1)
    if value < 1e60:
        pca.fit(mine(x, comm))
        np.testing.assert_allclose(np.abs(pca.components_[0, 5]), 1, rtol=1e-6)
    else:
        with pytest.raises(ValueError, match="too large to be squared"):
            pca.fit(mine(x, comm))


@pytest.mark.mpi
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_units_whose_squares_no_float_holds(comm):
    x = mine(rows_of_all(500, 40), comm)
    small = PCA(3, random_state=0, comm=comm).fit(x * 1e-300)
    np.testing.assert_allclose(small.components_ @ small.components_.T, np.eye(3), atol=1e-8)
    with pytest.raises(ValueError, match="too large to be squared"):
        PCA(3, random_state=0, comm=comm).fit(x * 1e290)
    single = PCA(3, random_state=0, comm=comm).fit((x * 1e20).astype(np.float32))
    assert np.isfinite(single.explained_variance_).all() and single.components_.dtype == np.float32


@pytest.mark.mpi
@pytest.mark.parametrize("solver", ["auto", *SOLVERS])
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e-30), more("float32", 1e17), more("float64", 1e-140),
                                              more("float64", 1e-21), more("float64", 1e140)])  # fmt: skip
def test_any_units(comm, solver, dtype, scale):
    x = rows_of_all(500, 70)
    own = (mine(x, comm) * scale).astype(dtype)
    pca = PCA(3, solver=solver, tol=1e-10, random_state=0, comm=comm).fit(own)
    values, vectors, _ = exact(x)
    np.testing.assert_allclose(pca.singular_values_.astype(float) / scale, np.sqrt(values[:3] * 500), rtol=1e-4)
    np.testing.assert_allclose(pca.components_, vectors[:3], atol=1e-3)
    sparse = TruncatedSVD(3, solver="krylov", tol=1e-10, comm=comm).fit(scipy.sparse.csr_array(own))
    np.testing.assert_allclose(sparse.singular_values_.astype(float) / scale, np.sqrt(exact(x, False)[0][:3] * 500), rtol=1e-4)


@pytest.mark.mpi
@pytest.mark.parametrize("solver", ["auto", *SOLVERS])
@pytest.mark.parametrize(("dtype", "mean"), [("float32", 1e4), more("float64", 1e9)])
def test_rows_far_from_zero(comm, solver, dtype, mean):
    x = (rows_of_all(2000, 80, mean=0) + mean).astype(dtype)
    pca = PCA(3, solver=solver, random_state=0, comm=comm).fit(mine(x, comm))
    values, vectors, _ = exact(x.astype(float) - mean)
    np.testing.assert_allclose(pca.explained_variance_ * 1999 / 2000, values[:3], rtol=1e-5)
    np.testing.assert_allclose(np.abs(np.sum(pca.components_ * vectors[:3], axis=1)), 1, rtol=1e-5)
    np.testing.assert_allclose(pca.mean_, x.mean(axis=0, dtype=float), rtol=1e-6)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("setting", [{"tol": 1e-3}, {"solver": "krylov"}, {"n_components": 4}, {"sync_every": 3},
                                     {"whiten": True}])  # fmt: skip
def test_ranks_with_different_settings(comm, setting):
    given = {"n_components": 3, "solver": "vr", **(setting if comm.rank else {})}
    with pytest.raises(MismatchError, match=f"PCA: got .*{next(iter(setting))}|{next(iter(setting))}"):
        PCA(comm=comm, **given).fit(rows_of_all(100, 20))


@pytest.mark.mpi
def test_a_seed_that_makes_no_sense(comm):
    with pytest.raises(ValueError, match="cannot be used to seed"):
        PCA(2, random_state="abc", comm=comm).fit(rows_of_all(100, 20))


def test_weights_that_do_not_count_rows():
    with pytest.raises(ValueError, match="weights with a sum of 1, expected a sum of 2 or more"):
        PCA(2).fit(rows_of_all(100, 20), sample_weight=np.full(100, 0.01))


def test_streams_that_make_no_sense():
    for pca, x, message in [
        (PCA(0.5), np.eye(5), "expected a whole number for partial_fit"),
        (PCA(4), np.eye(5)[:2], "n_components: got 4, expected a whole number from 1 to 2"),
        (PCA(2), scipy.sparse.csr_array(np.eye(5)), "got a sparse batch"),
    ]:
        with pytest.raises(ValueError, match=message):
            pca.partial_fit(x)
    with pytest.raises(ValueError, match="expecting 5 features"):
        PCA(2).partial_fit(np.eye(5)).partial_fit(np.eye(4))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_components": 31}, "n_components: got 31, expected a whole number from 1 to"),
        ({"n_components": 0}, "n_components: got 0, expected"),
        ({"n_components": 1.5}, r"n_components: got 1\.5, expected"),
        ({"n_components": True}, "n_components: got True, expected"),
        ({"n_components": "mle"}, "n_components: got 'mle', expected"),
        ({"solver": "full"}, "solver: got 'full', expected one of auto"),
        ({"tol": -1.0}, "tol: got -1.0"),
        ({"max_passes": 0}, "max_passes: got 0"),
        ({"solver": "vr", "sync_delay": -1}, "sync_delay: got -1"),
        ({"solver": "vr", "snapshot_fraction": 0}, "snapshot_fraction: got 0"),
        ({"solver": "vr", "batch_size": 2.5}, "batch_size: got 2.5"),
        ({"solver": "vr", "step_size": 0.0}, "step_size: got 0.0"),
        ({"threads": -1}, "threads: got -1"),
    ],
)
def test_settings_that_make_no_sense(comm, settings, message):
    with pytest.raises(ValueError, match=message):
        PCA(**{"n_components": 2, **settings}, comm=comm).fit(mine(rows_of_all(100, 30), comm))


@pytest.mark.mpi
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_found_where_it_is(comm, solver, bad):
    x = rows_of_all(100, 20)
    last = comm.size - 1
    if comm.rank == last:
        x[17, 3] = bad
    word = "NaN" if np.isnan(bad) else "infinity"
    with pytest.raises(ValueError, match=f"Input X contains {word}: row 17, column 3"):
        PCA(2, solver=solver, comm=comm).fit(x)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.ones((5, 4), complex), "[Cc]omplex"),
        (np.ones(5), "1D array"),
        (np.array([["a"] * 4]), "string|convert"),
        (np.ones((5, 0)), "0 feature"),
    ],
)
def test_one_ranks_wrong_input_is_everybodys_error(comm, bad, message):
    x = bad if comm.rank == comm.size - 1 else np.random.default_rng(0).random((50, 4))
    with pytest.raises(ValueError, match=message):
        PCA(2, comm=comm).fit(x)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("odd", "message"), [(np.ones((5, 3)), "columns"), (np.ones((5, 4), "float32"), "dtype")])
def test_ranks_with_other_columns_or_dtypes(comm, odd, message):
    with pytest.raises(MismatchError, match=message):
        PCA(2, comm=comm).fit(odd if comm.rank else np.ones((5, 4)))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.zeros(9), "got no row with a sample_weight above zero on any rank"),
        (-np.ones(9), "negative weights"),
        (np.ones(8), "got shape"),
        (np.full(9, np.nan), "NaN"),
    ],
)
def test_weights_that_make_no_sense(comm, weights, message):
    with pytest.raises(ValueError, match=message):
        PCA(2, comm=comm).fit(np.random.default_rng(0).random((9, 4)), sample_weight=weights)


def test_no_rows_at_all():
    with pytest.raises(ValueError, match="minimum of 1 is required"):
        PCA(2).fit(np.empty((0, 4)))


@pytest.mark.mpi(min_size=2)
def test_no_rows_on_any_rank(comm):
    for weights in (None, np.empty(0)):
        with pytest.raises(MpiddlError, match="X: got 0 rows on all ranks, expected one or more"):
            PCA(2, comm=comm).fit(np.empty((0, 4)), sample_weight=weights)


@pytest.mark.mpi(min_size=2)
def test_rows_of_weight_zero_on_one_rank_and_none_on_others(comm):
    rows = np.ones((int(comm.rank == 1), 4))
    with pytest.raises(MpiddlError, match="X: got no row with a sample_weight above zero"):
        PCA(2, comm=comm).fit(rows, sample_weight=np.zeros(len(rows)))


def last_only(comm, name):
    """Sound rows, but on the last rank with that change."""
    x = scipy.sparse.csr_array(rows_with_gaps(comm.rank))
    return with_change(x, name) if comm.rank == comm.size - 1 else x


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_sparse_rows_of_one_rank_are_everybodys_error(damage, size):
    message = f"^X: {DAMAGES[damage][2]}"

    def program(comm):
        pca = PCA(2, comm=comm)
        for call in (pca.fit, pca.fit_transform):
            with pytest.raises(DataError, match=message):
                call(last_only(comm, damage))
        pca.fit(scipy.sparse.csr_array(rows_with_gaps()))
        with pytest.raises(DataError, match=message) if comm.rank == comm.size - 1 else nullcontext():
            pca.transform(last_only(comm, damage))

    virtual.run(size, program)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", [PCA, TruncatedSVD])
def test_sparse_rows_that_are_not_sorted_or_come_in_parts(kind, size):
    def program(comm):
        wanted = kind(3, tol=1e-12, comm=comm).fit(rows_with_gaps(comm.rank))
        for name in LEGAL:
            for solver in ("gram", "krylov"):
                found = kind(3, tol=1e-12, solver=solver, comm=comm).fit(last_only(comm, name))
                for one in ("singular_values_", "explained_variance_ratio_"):
                    np.testing.assert_allclose(getattr(found, one), getattr(wanted, one), rtol=1e-9, err_msg=f"{name} {one}")
                scores = found.transform(last_only(comm, name))
                np.testing.assert_allclose(scores, found.transform(rows_with_gaps(comm.rank)), atol=1e-12, err_msg=name)

    virtual.run(size, program)


def test_damaged_sparse_rows_in_other_formats():
    for name, x in damaged_coordinates():
        with pytest.raises(DataError, match=r"^X: "):
            pytest.fail(f"{name}: {PCA(2).fit(x).singular_values_}")


def hidden(shape, entry=(3, 1)):
    """Rows of which an entry is masked: behind it is a fill value."""
    x = np.ma.array(np.random.default_rng(0).standard_normal(shape))
    x[entry] = 1e4
    x[entry] = np.ma.masked
    return x


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", [PCA, TruncatedSVD])
def test_values_behind_a_mask_are_not_read(kind, size):
    plain = np.random.default_rng(0).standard_normal((60, 8))

    def program(comm):
        model = kind(2, comm=comm)
        last = comm.rank == comm.size - 1
        x, weights = hidden((60, 8)) if last else plain, hidden(60, 3) ** 2 if last else np.ones(60)
        for call in (model.fit, model.partial_fit, model.fit_transform):
            with pytest.raises(DataError, match=r"X: got a masked array \(masked entries: 1\), expected no"):
                call(x)
            with pytest.raises(DataError, match="sample_weight: got a masked array"):
                call(plain, sample_weight=weights)
        with pytest.raises(DataError, match="X: got a masked array"):
            model.fit(list(x))
        model.fit(plain)
        for call, rows in ((model.transform, hidden((60, 8))), (model.inverse_transform, hidden((60, 2)))):
            with pytest.raises(DataError, match="X: got a masked array"):
                call(rows)
        with pytest.raises(DataError, match="x: got a masked array"):
            DenseRows(x if last else hidden((60, 8)))

    virtual.run(size, program)


def test_masked_arrays_without_masked_entries():
    """NetCDF files are read as such."""
    x = np.random.default_rng(0).standard_normal((60, 8))
    for mask in (np.ma.nomask, np.zeros(x.shape, bool)):
        masked = np.ma.array(x, mask=mask)
        found, wanted = PCA(2).fit(masked), PCA(2).fit(x)
        np.testing.assert_array_equal(found.components_, wanted.components_)
        np.testing.assert_array_equal(found.transform(masked), wanted.transform(x))


def same_as_scaled(found, wanted, scale):
    """All that has no square of a row in it, and signs."""
    np.testing.assert_allclose(found.singular_values_ / scale, wanted.singular_values_, rtol=1e-9)
    np.testing.assert_allclose(found.explained_variance_ratio_, wanted.explained_variance_ratio_, rtol=1e-9)
    np.testing.assert_allclose(found.components_, wanted.components_, atol=1e-6)


@pytest.mark.parametrize("kind", [PCA, TruncatedSVD])
@pytest.mark.parametrize("scale", [2.0**-525, 2.0**-990, *map(more, (2.0**-500, 2.0**-540, 2.0**-660))])
def test_rows_whose_squares_are_zero(kind, scale):
    x, weights = rows_of_all(400, 70), np.arange(400.0) % 3

    def program(comm):
        own, own_weights = mine(x, comm), mine(weights, comm)
        for solver in SOLVERS:
            model = kind(3, solver=solver, tol=1e-13, random_state=0, comm=comm)
            wanted = pickle.loads(pickle.dumps(model.fit(own, sample_weight=own_weights)))
            same_as_scaled(model.fit(own * scale, sample_weight=own_weights), wanted, scale)
            assert model.explained_variance_[0] < 1e-290
        wanted = pickle.loads(pickle.dumps(kind(3, solver="krylov", tol=1e-13, comm=comm).fit(own)))
        same_as_scaled(kind(3, solver="krylov", tol=1e-13, comm=comm).fit(scipy.sparse.csr_array(own * scale)), wanted, scale)
        one, other = kind(3, tol=1e-12, comm=comm), kind(3, tol=1e-12, comm=comm)
        for part in (own[::2], own[1::2]):
            same_as_scaled(other.partial_fit(part * scale), one.partial_fit(part), scale)
        if kind is PCA:
            share = PCA(0.8, comm=comm).fit(own * scale)
            assert share.n_components_ == PCA(0.8, comm=comm).fit(own).n_components_

    virtual.run(2, program)


def test_small_batches_after_larger_ones():
    x = rows_of_all(90, 12)
    for first, second in ((1e-140, 1e-160), (1e-160, 1e-140), (1e-118, 1e-122)):
        stream = PCA(3).partial_fit(x[:40] * first).partial_fit(x[40:] * second)
        larger = max(first, second)
        wanted = PCA(3).partial_fit(x[:40] * (first / larger)).partial_fit(x[40:] * (second / larger))
        same_as_scaled(stream, wanted, larger)


@pytest.mark.parametrize("kind", [PCA, TruncatedSVD])
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 2.0**-80), ("float32", 2.0**70), ("float64", 2.0**-300),
                                              ("float64", 2.0**40)])  # fmt: skip
def test_variances_are_those_of_the_rows(kind, dtype, scale):
    x = rows_of_all(400, 70, dtype=dtype)
    wanted, found = (kind(3, solver="krylov", tol=1e-6).fit(rows) for rows in (x, (x * scale).astype(dtype)))
    for name in ("explained_variance_", *["noise_variance_"] * (kind is PCA)):
        np.testing.assert_allclose(getattr(found, name) / scale**2, getattr(wanted, name), rtol=1e-5, atol=1e-12, err_msg=name)
    assert found.history_[-1].explained / scale**2 == pytest.approx(wanted.history_[-1].explained, rel=1e-5)
    if kind is PCA:
        assert PCA(3, whiten=True).fit((x * scale).astype(dtype)).transform(x).dtype == dtype
