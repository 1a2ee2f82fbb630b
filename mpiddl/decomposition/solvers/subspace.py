"""A subspace that grows by blocks, what the matrix makes of it, and its Ritz pairs: the best that it holds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpiddl.decomposition.rows.column_split import Spread, of_rank_0


class Ritz(NamedTuple):
    """Approximate eigenpairs, largest first, with the residuals R = A vectors - vectors values.

    ``vectors`` and ``residuals`` may be this rank's slices (`spread`); ``products`` (p, p) is R^T R of all entries. ``doubt``:
    how much values may be wrong, beside what residuals tell, because A was estimated.
    """

    values: np.ndarray
    vectors: np.ndarray
    residuals: np.ndarray
    products: np.ndarray
    doubt: np.ndarray | float = 0.0

    @property
    def sizes(self) -> np.ndarray:
        """Of the residuals, (p,)."""
        return np.sqrt(self.products.diagonal())


class Subspace:
    """An orthonormal basis V (d, m) with its images A V and V^T A V, for a symmetric A; at most ``most`` columns.

    A block of p columns costs 2 d m p operations, p Ritz pairs 4 d m p; memory 2 d ``most`` numbers, touched as they are used.

    Communication
    -------------
    Collective where vectors are sliced: a sum of (m, p) numbers for each block and of (p, p) for Ritz pairs.
    """

    def __init__(self, spread: Spread, most: int):
        self.spread, self._m = spread, 0
        self._basis, self._images = (np.empty((spread.rows, most), order="F") for _ in range(2))
        self._projected = np.zeros((most, most))
        self._rotation = np.zeros((0, 0))

    @property
    def basis(self) -> np.ndarray:
        return self._basis[:, : self._m]

    @property
    def images(self) -> np.ndarray:
        return self._images[:, : self._m]

    @property
    def trace(self) -> float:
        """Of V^T A V."""
        return float(self._projected.diagonal()[: self._m].sum())

    def extend(self, new: np.ndarray, images: np.ndarray, sampled: bool = False) -> np.ndarray:
        """Take in more columns, orthogonal to the others, and their images; returns (A V)^T new, (m, p), which is what the
        images have along V.

        ``sampled``: the images are estimates. What they have along V is then replaced by what is known, (A V)^T new.
        """
        old, grown = self._m, self._m + new.shape[1]
        if sampled:
            along = self.spread.sum(np.concatenate([self.images.T @ new, self.basis.T @ images]))
            images = images + self.basis @ (along[:old] - along[old:])
        self._basis[:, old:grown], self._images[:, old:grown] = new, images
        across = self.spread.sum(self._images[:, :grown].T @ new)
        self._projected[:grown, old:grown], self._projected[old:grown, :grown] = across, across.T
        self._m = grown
        return across

    def drop(self, columns: int) -> None:
        """Forget the last columns."""
        self._m -= columns

    def leading(self, p: int) -> tuple[np.ndarray, np.ndarray]:
        """The ``p`` leading Ritz values and vectors; rank 0's solution of the small problem counts.

        Communication
        -------------
        Collective: a broadcast of m^2 + m numbers.
        """
        projected = self._projected[: self._m, : self._m]
        values, self._rotation = of_rank_0(self.spread.comm, lambda: _descending(projected))
        return values[:p], self.basis @ self._rotation[:, :p]

    def ritz(self, p: int) -> Ritz:
        """`leading` and what is left of them; where vectors are sliced, collective once more."""
        values, vectors = self.leading(p)
        residuals = self.images @ self._rotation[:, :p] - vectors * values
        return Ritz(values, vectors, residuals, self.spread.sum(residuals.T @ residuals))

    def weights(self, last: int, p: int) -> np.ndarray:
        """How the last Ritz vectors, ``p`` of them, are made of the ``last`` columns."""
        return self._rotation[-last:, :p]

    def make_room(self, columns: int, kept: int) -> None:
        """Cut down to the ``kept`` leading of the last Ritz vectors where there is no room for so many more columns."""
        if self._m + columns <= self._basis.shape[1]:
            return
        rotation, self._m = self._rotation[:, :kept], 0
        basis, images = self._basis[:, : len(rotation)] @ rotation, self._images[:, : len(rotation)] @ rotation
        self.extend(basis, images)


def _descending(projected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues and eigenvectors of a small symmetric matrix, largest first."""
    values, rotation = np.linalg.eigh((projected + projected.T) / 2)
    return values[::-1].copy(), rotation[:, ::-1].copy()
