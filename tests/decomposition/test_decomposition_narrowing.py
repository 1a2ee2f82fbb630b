"""How many columns a pass takes: fewer where the rest would bring next to nothing."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddl.decomposition import PCA
from mpiddl.decomposition.rows import covariance
from mpiddl.decomposition.rows.column_split import Whole
from mpiddl.decomposition.solvers.narrowing import LEFT_OUT, narrowed
from mpiddl.decomposition.solvers.orthogonal import orthonormal
from mpiddl.decomposition.solvers.subspace import Ritz
from mpiddl.kernels.rows.normal_product import padded_columns
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

D, P, K = 60, 8, 6
(WHOLE,) = virtual.run(1, lambda comm: Whole(comm, D))


def pairs(sizes, seed=0):
    """Ritz pairs whose residuals have these sizes, and the basis of their directions."""
    rng = np.random.default_rng(seed)
    space = np.linalg.qr(rng.standard_normal((D, 2 * P)))[0]
    residuals = space[:, P:] * sizes
    ritz = Ritz(np.linspace(2.0, 1.0, P), space[:, :P], residuals, residuals.T @ residuals)
    return ritz, orthonormal(WHOLE, ritz.residuals)


def found(new, ritz):
    """What directions ``new`` find of the variance that the first K miss, by parts, to first order."""
    gaps = ritz.values[:K] - ritz.values[-1]
    return ((new.T @ ritz.residuals[:, :K]) ** 2).sum(axis=0) / gaps


@pytest.mark.parametrize("seed", range(3))
def test_what_is_left_out_is_next_to_nothing(seed):
    ritz, new = pairs(np.array([1e-9, 1e-7, 1e-3, 1e-2, 1e-1, 1e-1, 1.0, 1.0]), seed)
    few = narrowed(WHOLE, new, ritz.residuals, ritz, K, lambda k: k)
    assert few.shape == (D, 2)
    np.testing.assert_allclose(few.T @ few, np.eye(2), atol=1e-12)
    assert found(few, ritz).sum() >= (1 - LEFT_OUT) * found(new, ritz).sum()


def test_as_much_is_left_as_may_be():
    ritz, new = pairs(np.array([1e-9, 1e-7, 1e-3, 1e-2, 1e-1, 1.0, 1.0, 1.0]))
    all_found = found(new, ritz).sum()
    widths = []
    for left_out in (0.0, 0.01, 0.3, 0.6):
        few = narrowed(WHOLE, new, ritz.residuals, ritz, K, lambda k: k, left_out)
        assert found(few, ritz).sum() >= (1 - left_out) * all_found * (1 - 1e-12)
        widths.append(few.shape[1])
    assert widths[0] == K and widths == sorted(widths, reverse=True) and widths[-1] == 1


def test_whole_vectors_of_columns_are_taken():
    ritz, new = pairs(np.array([1e-9, 1e-7, 1e-3, 1e-2, 1e-1, 1e-1, 1.0, 1.0]))
    assert narrowed(WHOLE, new, ritz.residuals, ritz, K, lambda k: -(-k // 4) * 4).shape == (D, 4)
    assert narrowed(WHOLE, new, ritz.residuals, ritz, K, lambda k: -(-k // 8) * 8) is new


def test_components_that_are_alike_keep_all_columns():
    ritz, new = pairs(np.ones(P))
    assert narrowed(WHOLE, new, ritz.residuals, ritz, P, lambda k: k) is new  # no gap is known
    assert narrowed(WHOLE, new, ritz.residuals, ritz, K, lambda k: -(-k // 4) * 4) is new


def test_the_scale_of_directions_does_not_matter():
    ritz, new = pairs(np.array([1e-9, 1e-7, 1e-3, 1e-2, 1e-1, 1e-1, 1.0, 1.0]))
    one = narrowed(WHOLE, new, ritz.residuals, ritz, K, lambda k: k)
    other = narrowed(WHOLE, new, ritz.residuals * np.logspace(-3, 3, P), ritz, K, lambda k: k)
    np.testing.assert_allclose(one @ one.T, other @ other.T, atol=1e-12)


def test_passes_get_narrower_and_the_tolerance_holds():
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((4000, 300)) * (1 + np.arange(300) / 4) ** -1.0).astype(np.float32)
    exact = np.linalg.svd(x - x.mean(axis=0, dtype=float), compute_uv=False)[:10] ** 2
    widths = []

    def program(comm):
        apply = covariance.Covariance.apply

        def noted(self, w):
            if self.rows.n == len(x):
                widths.append(padded_columns(w.shape[1], 4))
            return apply(self, w)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(covariance.Covariance, "apply", noted)
            return PCA(10, solver="krylov", tol=1e-10, random_state=0, comm=comm).fit(x)

    (pca,) = virtual.run(1, program)
    assert widths == sorted(widths, reverse=True)
    scores = (x - x.mean(axis=0, dtype=float)) @ np.linalg.qr(pca.components_.T.astype(float))[0]
    assert 1 - (scores**2).sum() / exact.sum() <= 1e-10
    if padded_columns(10, 4) > padded_columns(1, 4):  # vectors of 16 numbers leave no choice
        assert widths[-1] < widths[0]
