"""A user's program with types: `make types` checks it with mypy --strict."""
from __future__ import annotations

import numpy as np
from mpi4py import MPI

import mpiddl
from mpiddl.decomposition import PCA
from mpiddl.strategies import LocalSGD


def main() -> None:
    comm = mpiddl.Communicator(MPI.COMM_WORLD)
    total = np.zeros(10)
    comm.Allreduce(np.ones(10), total)
    half = comm.Split(comm.Get_rank() % 2)
    half.Free()
    x = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    result = mpiddl.train("mlp", (x, y), strategy=LocalSGD(period=4), epochs=2, quiet=True)
    print(result.summary["test_accuracy"], {name: array.shape for name, array in result.params.items()})
    pca = PCA(n_components=3).fit(x)
    print(pca.explained_variance_, pca.transform(x).shape)
    print(comm.why("allreduce", 1 << 20))


if __name__ == "__main__":
    main()
