"""Rows that come in batches: what was found is carried on as a few rows that stand for all earlier ones.

    earlier rows, about their mean m of N:  sqrt(s_i) v_i^T, s_i being the leading eigenvalues of their scatter
    a batch of M rows about its own mean:   x - m'
    the two means:                          sqrt(N M / (N + M)) (m - m')^T

The scatter of all rows about their common mean is that of these rows, not centred; what is lost is what earlier batches had
beyond the directions that are kept, twice as many as are wanted.

Cost: that of decomposing a batch; an all-reduce of d + 1 numbers for its mean.

References
----------
D. Ross, J. Lim, R. Lin, M. Yang, Int. J. Comput. Vis. 77, 2008, doi:10.1007/s11263-007-0075-7, section 2. Means and
variances: T. Chan, G. Golub, R. LeVeque, 1983, doi:10.1080/00031305.1983.10483115.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mpiddl.decomposition.rows.covariance import NotFinite
from mpiddl.decomposition.rows.dense import DenseRows
from mpiddl.decomposition.rows.sums import allreduce
from mpiddl.decomposition.solve import Result, solve
from mpiddl.errors import ConvergenceError
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm


def merged(comm: Comm, rows: DenseRows, earlier: Result | None, k: int, center: bool, **settings: Any) -> Result:
    """All rows so far: a batch, ``rows`` on this rank, after those that ``earlier`` stands for; ``k`` or more components.

    ``settings`` are `solve`'s. Raises what `solve` does.
    """
    message = np.append(rows.weighted_sum(), (rows.total, rows.n))
    allreduce(comm, IN_PLACE, message)
    if not np.isfinite(message).all():
        raise NotFinite
    total, n = message[-2], int(message[-1])
    mean = message[:-2] / total
    x = rows.x - mean.astype(rows.dtype) if center else rows.x
    if earlier is not None and comm.rank == 0:
        standing = (np.sqrt(earlier.values * earlier.total) * earlier.unit)[:, None] * earlier.components
        if center:
            apart = np.sqrt(earlier.total * total / (earlier.total + total)) * (earlier.mean - mean)
            standing = np.concatenate([standing, apart[None]])
        x = np.concatenate([standing.astype(rows.dtype), x])
        ones = np.ones(len(standing), rows.dtype)
        rows = DenseRows(x, np.concatenate([ones, rows.weights]) if rows.weights.size else None, rows.threads)
    else:
        rows = DenseRows(x, rows.weights if rows.weights.size else None, rows.threads)
    stacked = sum(comm.allgather(rows.n))
    failure: ConvergenceError | None = None
    try:
        found = solve(comm, rows, min(2 * k, stacked, rows.d), center=False, **settings)
    except ConvergenceError as error:
        assert isinstance(error.best, Result)
        found, failure = error.best, error
    scale = found.total / (total + (earlier.total if earlier else 0.0))
    own = replace(found, n=n, total=total, mean=mean, values=found.values * scale, errors=found.errors * scale)
    result = _with_moments(own, found, earlier.in_unit(found.unit) if earlier else None, center)
    if failure is not None:
        raise ConvergenceError(str(failure), result)
    return result


def _with_moments(own: Result, found: Result, earlier: Result | None, center: bool) -> Result:
    """Number, mean and variances of all rows: the stacked rows have the scatter of all of them, of the batch alone not.

    All variances are in the same unit."""
    unit = own.unit
    if earlier is None:
        squares = (found.variances + (found.mean / unit) ** 2) * found.total / own.total
        return replace(own, variances=squares if center else squares - (own.mean / unit) ** 2)
    both = own.total + earlier.total
    mean = (own.total * own.mean + earlier.total * earlier.mean) / both
    # Standing rows leave out what lies beyond their directions: columns' variances are added up apart.
    kept = (earlier.components**2 * earlier.values[:, None]).sum(axis=0) * earlier.total
    had = (earlier.variances + (0 if center else (earlier.mean / unit) ** 2)) * earlier.total
    scatter = (found.variances + (found.mean / unit) ** 2) * found.total - kept + had
    variances = scatter / both - (0 if center else (mean / unit) ** 2)
    return replace(own, n=own.n + earlier.n, total=both, mean=mean, variances=np.maximum(variances, 0.0))
