"""The samples of a fit: what this rank holds of them, which of a batch it computes, and what every rank knows of all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_array, issparse
from sklearn.utils.validation import _check_sample_weight, check_array, check_consistent_length, validate_data

from mpiddl.decomposition.rows_of_all import ALL, check_same
from mpiddl.errors import DataError, MismatchError, UsageError
from mpiddl.layout import block_bounds
from mpiddl.memory import for_kernels
from mpiddl.transport.agree import agreed_errors, check_equal
from mpiddl.transport.comm import Comm


@dataclass(frozen=True)
class Samples:
    """Samples, numbered over all ranks.

    Attributes
    ----------
    x : ndarray or CSR matrix
        The rows that lie on this rank.
    first : int or None
        Number of the first of them; None if all rows lie on every rank.
    y : ndarray, shape (n, k)
        Targets of all samples: bool, or numbers in regression.
    weights : ndarray, shape (n,), or None
        Weights of all samples.
    """

    x: Any
    first: int | None
    y: np.ndarray
    weights: np.ndarray | None

    @property
    def n(self) -> int:
        """Samples of all ranks."""
        return len(self.y)

    @property
    def held(self) -> slice:
        """The numbers of the samples that lie on this rank."""
        return slice(0, self.n) if self.first is None else slice(self.first, self.first + self.x.shape[0])

    def share(self, comm: Comm, numbers: np.ndarray) -> np.ndarray:
        """Positions in ``numbers`` of the samples that this rank computes: an equal share, or those that it holds."""
        if self.first is None:
            return np.arange(*block_bounds(len(numbers), comm.size, comm.rank))
        held = self.held
        return np.flatnonzero((numbers >= held.start) & (numbers < held.stop))


def read_samples(model: Any, comm: Comm, X: Any, y: Any, sample_weight: Any, incremental: bool, reset: bool,
                 rows: str) -> Samples:
    """Check the data as scikit-learn does, and set the attributes that it sets: classes, features and their names.

    Raises
    ------
    ValueError, TypeError
        scikit-learn's, on every rank. On several ranks `DataError`, which names the ranks.
    MismatchError
        On every rank: data that should be the same on all ranks differ.

    Communication
    -------------
    Collective. ``rows="own"``: an all-gather of the targets and the weights of all samples. ``rows="all"``: one of a checksum.
    """
    if comm.size == 1 or rows == ALL:
        with alike(comm):
            x, targets = model._validate_input(X, y, incremental, reset)
            weights = None if sample_weight is None else _check_sample_weight(sample_weight, x)
        if comm.size > 1:
            check_same(comm, x, targets, weights)
        return Samples(_plain(x), None, _two_dimensional(targets), weights)
    return _own_samples(model, comm, X, y, sample_weight, incremental, reset)


@contextmanager
def alike(comm: Comm) -> Iterator[None]:
    """Checks of data that every rank has: what scikit-learn raises on all ranks is raised as it is."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if comm.size > 1:
        failed = comm.allgather(failure is not None)
        if any(failed) and not all(failed):
            raise MismatchError(f"rows: got data that scikit-learn refuses on rank {failed.index(True)} and accepts on others, "
                                "expected the same rows on every rank with rows='all'") from failure
    if failure is not None:
        raise failure


def _own_samples(model: Any, comm: Comm, X: Any, y: Any, sample_weight: Any, incremental: bool, reset: bool) -> Samples:
    with agreed_errors(comm):
        x, labels, weights = _own_rows(X, y, sample_weight)
    check_equal(comm, "X", {"columns": x.shape[1], "dtype": str(x.dtype), "sample_weight": weights is not None})
    counts, parts, several = zip(*comm.allgather((x.shape[0], labels, weights)), strict=True)
    if not sum(counts):
        raise UsageError("X: got 0 rows on all ranks, expected one or more")
    # scikit-learn sees all targets, and rows without entries in the place of those that lie on other ranks.
    stand_in = csr_array((sum(counts), x.shape[1]), dtype=x.dtype)
    names = None if reset else vars(model).pop("feature_names_in_", None)
    try:
        with agreed_errors(comm):
            _, targets = model._validate_input(stand_in, np.concatenate([part for part in parts if len(part)]), incremental,
                                               reset)
    finally:
        if names is not None:
            model.feature_names_in_ = names
    with agreed_errors(comm):
        validate_data(model, X, reset=reset, skip_check_array=True)
    first = sum(counts[: comm.rank])
    return Samples(_plain(x), first, _two_dimensional(targets), None if weights is None else np.concatenate(several))


def _own_rows(X: Any, y: Any, sample_weight: Any) -> tuple[Any, np.ndarray, np.ndarray | None]:
    """This rank's rows, checked one by one; there may be none."""
    if y is None:
        raise ValueError("y: got None, expected one target for each row")
    x = check_array(X, accept_sparse=["csr", "csc"], dtype=(np.float64, np.float32), ensure_min_samples=0, input_name="X")
    labels = y.toarray() if issparse(y) else np.asarray(y)
    check_consistent_length(x, labels)
    if sample_weight is None:
        return x, labels, None
    weights = check_array(sample_weight, dtype=x.dtype, ensure_2d=False, ensure_min_samples=0, input_name="sample_weight")
    if weights.shape != (x.shape[0],):
        raise DataError(f"sample_weight: got shape {weights.shape}, expected ({x.shape[0]},), one for each row")
    return x, labels, weights


def _plain(x: Any) -> Any:
    """CSR, or C-contiguous: as the kernels take it."""
    return x.tocsr() if issparse(x) else for_kernels(np.ascontiguousarray(x))


def _two_dimensional(y: Any) -> np.ndarray:
    y = y.toarray() if issparse(y) else y
    return y.reshape(-1, 1) if y.ndim == 1 else y
