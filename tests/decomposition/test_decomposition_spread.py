"""Long vectors whole on every rank, or sliced: the same numbers, in a part of the time and of the memory."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddl.decomposition import PCA
from mpiddl.decomposition.rows import column_split as spread
from mpiddl.decomposition.rows.column_split import Slices, Whole, spread_for
from mpiddl.decomposition.solvers.davidson import davidson, krylov
from mpiddl.decomposition.solvers.orthogonal import orthonormal
from mpiddl.layout import block
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

D = 53


def on_ranks(ranks, program):
    """What ``program`` returns for whole vectors on one rank, and for slices on several."""
    (whole,) = virtual.run(1, lambda comm: program(Whole(comm, D)))
    return whole, virtual.run(ranks, lambda comm: program(Slices(comm, D)))


def rows(seed=0, n=400):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, D)) * (1 + np.arange(D)) ** -0.9 + 0.3


@pytest.mark.parametrize("ranks", [2, 3, 7, 60])  # more ranks than entries, too
def test_slices_are_put_together_again(ranks):
    whole = np.arange(3.0 * D).reshape(D, 3)
    _, found = on_ranks(ranks, lambda link: link.whole(link.own(whole)))
    for own in found:
        np.testing.assert_array_equal(own, whole)


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_sums_over_ranks_come_in_slices(ranks):
    parts = np.random.default_rng(0).standard_normal((ranks, D, 4))
    rest = np.arange(5.0)
    _, found = on_ranks(ranks, lambda link: link.reduced(parts[link.comm.rank], rest))
    whole = np.concatenate([own for own, _ in found])[:D]
    np.testing.assert_allclose(whole, parts.sum(axis=0), atol=1e-12)
    for own, others in found:
        np.testing.assert_array_equal(others, ranks * rest)
        assert len(own) == -(-D // ranks)


@pytest.mark.parametrize("ranks", [2, 3, 60])
def test_random_blocks_end_where_vectors_end(ranks):
    _, found = on_ranks(ranks, lambda link: link.random(2, 0))
    whole = np.concatenate(found)
    assert not whole[D:].any() and whole[:D].all()


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("rank", [0, 2, 5])
def test_an_orthonormal_basis_of_slices(ranks, rank):
    rng = np.random.default_rng(1)
    basis = np.linalg.qr(rng.standard_normal((D, 6)))[0]
    given = rng.standard_normal((D, rank)) @ rng.standard_normal((rank, 5)) * np.logspace(-9, 0, 5)

    def program(link):
        return link.whole(orthonormal(link, link.own(given), link.own(basis)))

    _, found = on_ranks(ranks, program)
    for own in found:
        assert own.shape == (D, rank)
        np.testing.assert_allclose(own.T @ own, np.eye(rank), atol=1e-13)
        np.testing.assert_allclose(basis.T @ own, 0, atol=1e-13)
        np.testing.assert_array_equal(own, found[0])


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_eigenpairs_of_slices(ranks):
    x = rows()
    matrix = x.T @ x / len(x)
    wanted = np.linalg.eigvalsh(matrix)[::-1][:4]

    def program(link):
        start = link.own(np.random.default_rng(2).standard_normal((D, 8)))

        def done(ritz):
            return ritz.sizes[:4].max() < 1e-9

        ritz = davidson(link, lambda w: link.own(matrix @ link.whole(w)), start, krylov, done, most_columns=24)
        return ritz.values[:4], link.whole(ritz.vectors), ritz.residuals.shape

    _, found = on_ranks(ranks, program)
    for values, vectors, shape in found:
        np.testing.assert_allclose(values, wanted, rtol=1e-9)
        np.testing.assert_allclose(matrix @ vectors[:, :4], vectors[:, :4] * wanted, atol=1e-8)
        assert shape == (-(-D // ranks), 8)


@pytest.mark.parametrize("tol", [1e-3, 1e-9])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_components_do_not_depend_on_how_vectors_lie(monkeypatch, ranks, tol):
    x = rows(3, 3000)
    monkeypatch.setattr(spread, "SLICED_FROM", 1)

    def program(comm):
        own = block(len(x), comm.size, comm.rank)
        assert isinstance(spread_for(comm, D, 8), Slices if comm.size > 1 else Whole)
        return PCA(3, solver="krylov", tol=tol, random_state=0, comm=comm).fit(x[own.start : own.stop])

    (one,), several = virtual.run(1, program), virtual.run(ranks, program)
    exact = np.linalg.eigvalsh(np.cov(x.T))[::-1][:3].sum()
    for pca in several:
        assert 1 - pca.explained_variance_.sum() / exact < tol
        np.testing.assert_allclose(pca.explained_variance_, one.explained_variance_, atol=2 * tol * exact)
        np.testing.assert_array_equal(pca.components_, several[0].components_)
        if tol < 1e-6:
            np.testing.assert_allclose(pca.components_, one.components_, atol=1e-3)


@pytest.mark.mpi
def test_slices_over_mpi(comm, monkeypatch):
    monkeypatch.setattr(spread, "SLICED_FROM", 1)
    x = rows(5, 2000)
    own = block(len(x), comm.size, comm.rank)
    pca = PCA(4, solver="krylov", tol=1e-9, random_state=0, comm=comm).fit(x[own.start : own.stop])
    exact = np.linalg.eigvalsh(np.cov(x.T))[::-1][:4]
    np.testing.assert_allclose(pca.explained_variance_, exact, atol=2e-9 * exact.sum())
    np.testing.assert_allclose(pca.components_ @ pca.components_.T, np.eye(4), atol=1e-12)
    for other in comm.allgather(pca.components_):
        np.testing.assert_array_equal(other, pca.components_)


def test_what_is_not_finite_on_one_rank_is_said_on_all(monkeypatch):
    monkeypatch.setattr(spread, "SLICED_FROM", 1)
    x = rows(4, 900)
    x[850, 7] = np.nan

    def program(comm):
        own = block(len(x), comm.size, comm.rank)
        with pytest.raises(ValueError, match="NaN"):
            PCA(3, solver="krylov", random_state=0, comm=comm).fit(x[own.start : own.stop])

    virtual.run(3, program)
