"""Solvers for the leading directions, one a file, and what they share. The names here are what a solver of your own needs."""

from mpiddl.decomposition.rows.covariance import Covariance
from mpiddl.decomposition.solvers.base import Enough, Moment, Solver, Task
from mpiddl.decomposition.solvers.error_estimates import missed_variance
from mpiddl.decomposition.solvers.subspace import Ritz

__all__ = ["Covariance", "Enough", "Moment", "Ritz", "Solver", "Task", "missed_variance"]
