"""What a solver is: a class that turns a `Task` into leading eigenpairs of the covariance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpiddl.decomposition.rows.base import Rows
from mpiddl.decomposition.rows.covariance import Covariance, Effort
from mpiddl.decomposition.solvers.settings import Settings
from mpiddl.decomposition.solvers.subspace import Ritz
from mpiddl.transport.comm import Comm

Enough = Callable[[Ritz, np.ndarray, bool], bool]
"""Asked after a pass, with what its components miss, and whether that is to be believed."""


class Moment(NamedTuple):
    """Where a solver stood after a pass: what it had spent, the part of explained variance that it missed, by estimate, and
    the eigenvalues' sum that it had."""

    seconds: float
    passes: float
    rounds: int
    error: float
    explained: float


@dataclass(frozen=True)
class Task:
    """``k`` components of all ranks' ``n`` rows, by blocks of ``columns``; whether any rows are ``sparse``, or in ``files``.

    ``tol``: the part of explained variance that may be missed. ``floor``: a smaller variance is rounding. ``vr``: the settings
    of `vr`. ``effort``: passes and rounds are counted there. ``history``: a `Moment` for each pass so far.
    """

    comm: Comm
    rows: Rows
    n: int
    k: int
    columns: int
    tol: float
    center: bool
    seed: int
    vr: Settings
    effort: Effort
    floor: float
    sparse: bool
    files: bool
    history: list[Moment]


class Solver(ABC):
    """Base class of all solvers. A solver is made without arguments, and has no state.

    sparse, files : it takes sparse rows, and rows in files.
    compiled : it needs the compiled kernels for any rows, also for few.
    slow : convergence that hardly moves is no reason to stop.
    """

    sparse = True
    files = True
    compiled = False
    slow = False

    @abstractmethod
    def solve(self, task: Task, done: Enough) -> tuple[Covariance, Ritz]:
        """Return the covariance of all rows, and at least ``task.k`` eigenpairs. Collective.

        ``done(ritz, missed, believed)`` is asked after each pass. It returns whether that is enough; ``missed`` (k,) is what
        the components miss of variance, by estimate, and ``believed`` whether that is to be believed.
        """
