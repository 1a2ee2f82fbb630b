"""A numpy loop on many ranks makes the steps of one."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddl.data_parallel import DataParallel
from mpiddl.errors import ShapeError, UsageError


@pytest.mark.mpi
@pytest.mark.no_mpi
@pytest.mark.parametrize("strategy", ["auto", "two-step", "ring:overlap=1", "auto:bucket_bytes=64"])
@pytest.mark.parametrize("n", [1, 50])
def test_steps_of_one_rank(comm, strategy, n):
    rng = np.random.default_rng(7)
    x, y = rng.standard_normal((n, 3)), rng.standard_normal(n)
    weights, alone = [np.full(3, float(comm.rank)), np.zeros((1, 1))], [np.zeros(3), np.zeros((1, 1))]

    def gradient(weights, rows):
        error = x[rows] @ weights[0] + weights[1][0, 0] - y[rows]
        return [x[rows].T @ error / max(len(error), 1), np.full((1, 1), error.mean() if len(error) else np.nan)]

    with DataParallel(strategy, comm) as parallel:
        parallel.broadcast(weights)
        for _ in range(5):
            mine = parallel.rows(n)
            for each, mean in zip(weights, parallel.mean(gradient(weights, mine), mine.stop - mine.start), strict=True):
                each -= 0.1 * mean
            for each, mean in zip(alone, gradient(alone, slice(0, n)), strict=True):
                each -= 0.1 * mean
    for each, other in zip(weights, alone, strict=True):
        assert np.allclose(each, other, rtol=1e-12, atol=1e-12)


@pytest.mark.mpi
@pytest.mark.no_mpi
def test_dtypes_are_kept_and_large_counts_do_not_overflow(comm):
    given = [np.ones(2, np.float16), np.ones(3, np.float32), np.ones((), np.float64), np.ones(1, np.int32), np.zeros((0, 2))]
    with DataParallel(comm=comm) as parallel:
        found = parallel.mean(given, 100_000)
        assert [each.dtype.name for each in found] == ["float16", "float32", "float64", "float64", "float64"]
        assert all((each == 1).all() for each in found) and [each.shape for each in found] == [each.shape for each in given]
        assert all((each == 0).all() for each in parallel.mean(given, 0))


@pytest.mark.mpi
@pytest.mark.no_mpi
def test_mistakes_are_told(comm):
    with pytest.raises(UsageError, match="gossip"):
        DataParallel("gossip", comm)
    with DataParallel(comm=comm) as parallel:
        with pytest.raises(UsageError, match="complex"):
            parallel.mean([np.ones(2, complex)], 1)
        with pytest.raises(UsageError, match="rows: got -1"):
            parallel.mean([np.ones(2)], -1)
        with pytest.raises(UsageError, match="C-contiguous"):
            parallel.broadcast([np.ones((3, 4)).T])
        if comm.size > 1:
            with pytest.raises(ShapeError, match="shapes"):
                parallel.mean([np.ones(2 + comm.rank)], 1)


@pytest.mark.mpi
@pytest.mark.no_mpi
@pytest.mark.parametrize("other", [np.ones(5), np.ones(2, np.float32)], ids=["shape", "dtype"])
def test_one_rank_may_not_change_shapes_alone(comm, other):
    with DataParallel(comm=comm) as parallel:
        assert parallel.mean([np.ones(2)], 3)[0].tolist() == [1, 1]
        if comm.size > 1:
            with pytest.raises(ShapeError, match="expected the same on every rank"):
                parallel.mean([other if comm.rank == 1 else np.ones(2)], comm.rank)
        assert parallel.mean([np.ones(2)], 3)[0].tolist() == [1, 1]
        assert parallel.mean([2 * other], 3)[0].tolist() == (2 * other).tolist()
