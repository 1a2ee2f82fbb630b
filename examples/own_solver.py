"""A PCA solver of your own: orthogonal iteration, the block form of the power method (docs/decomposition.md).

    mpiexec -n 2 python examples/own_solver.py
    mpiexec -n 2 mpiddl pca rows.npy -k 3 --solver own_solver:OrthogonalIteration --out result     # in the folder of this file
"""

import numpy as np

from mpiddl.decomposition import PCA
from mpiddl.decomposition.solvers import Covariance, Enough, Ritz, Solver, Task, missed_variance


class OrthogonalIteration(Solver):
    """V = orth(C V) until the estimated error is small enough.

    Cost of each iteration: one pass over the rows, and one all-reduce of d p numbers, p columns of the block.
    """

    slow = True  # small gaps between eigenvalues take many passes: that is no reason to give up

    def solve(self, task: Task, done: Enough) -> tuple[Covariance, Ritz]:
        comm, rows = task.comm, task.rows
        covariance = Covariance(comm, rows, np.zeros(rows.d), task.center, task.effort)
        block = np.random.default_rng(task.seed).standard_normal((rows.d, task.columns))
        while True:
            block = np.linalg.qr(block)[0]
            comm.Bcast(block)  # the same bits on all ranks, also on different processors
            image = covariance.apply(block)
            values, rotation = np.linalg.eigh(block.T @ image)
            values, vectors, image = values[::-1], block @ rotation[:, ::-1], image @ rotation[:, ::-1]
            residuals = image - vectors * values
            ritz = Ritz(values, vectors, residuals, residuals.T @ residuals)
            enough = done(ritz, missed_variance(ritz, task.k), True)
            if comm.bcast(enough or covariance.trace <= task.floor):
                return covariance, ritz
            block = image


def main() -> None:
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    whole = np.random.default_rng(0).standard_normal((2000, 40)) * np.linspace(3, 0.1, 40)
    for solver in ("gram", "own_solver:OrthogonalIteration"):
        pca = PCA(3, solver=solver, random_state=0).fit(whole[rank::size])
        if rank == 0:
            print(f"{solver}: variances {np.round(pca.explained_variance_, 6)}, {pca.n_passes_:.0f} passes")


if __name__ == "__main__":
    main()
